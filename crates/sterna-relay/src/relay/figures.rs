//! What is known about a session at one moment.

use std::time::Duration;

use crate::frame::{RouteName, SessionId};
use crate::phase::Phase;
use crate::session::Role;

/// A snapshot of a session. It stays valid after the session has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Figures {
    /// The session.
    pub session: SessionId,
    /// The place of this relay in it.
    pub role: Role,
    /// Its route.
    pub route: RouteName,
    /// The other relay, as the address of its connection; `None` before the first one.
    pub peer: Option<String>,
    /// Whether it relays.
    pub status: SessionStatus,
    /// The phase of the migration; `None` before a main channel began.
    pub phase: Option<Phase>,
    /// The RAM round, from 1; 0 before RAM.
    pub round: u32,
    /// Time since the session began.
    pub age: Duration,
    /// Bytes of the guest's RAM, if the stream states them.
    pub ram_bytes: Option<u64>,
    /// Bytes of RAM that still have to pass, as far as the main channel shows them: exact in the first round, an estimate
    /// later. `None` with multifd channels, and for streams that are not read.
    pub remaining_bytes: Option<u64>,
    /// Bytes of RAM per second that the guest wrote: the pages of the last complete round, over the time of the round
    /// before. `None` before the end of the second round.
    pub dirty_rate: Option<u64>,
    /// Bytes of all connections from the source's VMM: taken here at the source, passed on here at the destination.
    pub processed_bytes: u64,
    /// Such bytes per second, over the last second.
    pub rate: u64,
    /// The other direction: bytes to the source's VMM.
    pub answered_bytes: u64,
    /// From the moment in which the stream shows a stopped guest to the destination's answer; while it lasts, until now.
    ///
    /// It begins with SWITCHOVER_START, or without this command after the last section of RAM before the last one. It ends
    /// with SHUT, or in postcopy with the package that starts the guest. Its error is the time that bytes need between the
    /// VMM and this relay.
    pub downtime: Option<Duration>,
    /// Whether `downtime` is complete.
    pub is_downtime_over: bool,
    /// Bytes of connections in the frames that this relay has sent, repetitions included.
    pub sent_bytes: u64,
    /// Bytes that these frames had for them: fewer if they were compressed.
    pub sent_payload_bytes: u64,
    /// Bytes of connections that this relay has sent again.
    pub resent_bytes: u64,
    /// Carriers that were lost, and carriers that replaced them.
    pub lost_carriers: u64,
    /// See [`lost_carriers`](Self::lost_carriers).
    pub reconnections: u64,
    /// Carriers that are connected.
    pub carriers: u32,
    /// How long there has been no carrier; `None` while there is one.
    pub lost_for: Option<Duration>,
    /// Connections of VMMs that are open.
    pub open_flows: u32,
    /// Connections of VMMs so far.
    pub flows: u64,
    /// Bytes that this relay holds: not acknowledged by the other one, or not taken by the VMM.
    pub held_bytes: u64,
}

impl Figures {
    /// The figures of a session that has just begun. The fields are public, for tests of programs that show figures.
    pub fn begun(session: SessionId, role: Role, route: RouteName) -> Self {
        Self {
            session,
            role,
            route,
            peer: None,
            status: SessionStatus::Running,
            phase: None,
            round: 0,
            age: Duration::ZERO,
            ram_bytes: None,
            remaining_bytes: None,
            dirty_rate: None,
            processed_bytes: 0,
            rate: 0,
            answered_bytes: 0,
            downtime: None,
            is_downtime_over: false,
            sent_bytes: 0,
            sent_payload_bytes: 0,
            resent_bytes: 0,
            lost_carriers: 0,
            reconnections: 0,
            carriers: 0,
            lost_for: None,
            open_flows: 0,
            flows: 0,
            held_bytes: 0,
        }
    }

    /// How many bytes of connections one sent byte carried: 1.0 without compression.
    pub fn compression_ratio(&self) -> f64 {
        match self.sent_payload_bytes {
            0 => 1.0,
            payload => self.sent_bytes as f64 / payload as f64,
        }
    }

    /// The name of the role: `source` or `destination`.
    pub fn role_word(&self) -> &'static str {
        match self.role {
            Role::Dialer => "source",
            Role::Acceptor => "destination",
        }
    }

    /// The phase in one word; `none` before a main channel began.
    pub fn phase_word(&self) -> &'static str {
        self.phase.as_ref().map_or("none", Phase::word)
    }
}

/// Whether a session relays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionStatus {
    /// It relays, or connects again.
    Running,
    /// The end of the stream was sent, and the relays have lost each other: the VMM is kept waiting.
    Waiting,
    /// It has ended.
    Over,
}

impl SessionStatus {
    /// The status in one word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Waiting => "waiting",
            Self::Over => "over",
        }
    }
}
