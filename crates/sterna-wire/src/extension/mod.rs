//! Messages between two Sternas beyond QEMU's format (`specs/extension.md`).
//!
//! The source sends no other part of the extension until the destination has shown that it is a Sterna. The
//! source asks with two PINGs, [`EXTENSION_PING`] and [`FENCE_PING`]. Every destination echoes both. A Sterna
//! sends an additional PONG before the fence's echo, which [`Features::from_pong`] recognises. The fence's echo
//! therefore ends the wait: without that PONG before it, the destination is not a Sterna.

mod configuration;
mod handover;
mod memory;
mod preempt;
mod reconnect;
mod secret;
mod status;

pub use configuration::{ConfigurationRefusal, SourceConfiguration};
pub use handover::Handover;
pub use memory::{HandedOver, MemoryAnswer, MemoryOffer};
pub use preempt::PreemptHello;
pub use reconnect::{
    Holds, ReconnectAnswer, ReconnectAnswerHead, ReconnectChannel, ReconnectHello, decode_held, encode_held,
    most_held_bytes,
};
pub use secret::{MacBytes, MigrationSecret};
pub use status::{ChannelBinding, Status, StatusAnswer, StatusQuestion};

/// Asks the destination whether it is a Sterna (§1).
pub const EXTENSION_PING: u32 = 0x5354_4e01;
/// Sent right after [`EXTENSION_PING`]. Its echo means that no further answer follows (§1).
pub const FENCE_PING: u32 = 0x5354_4e02;
/// Sent after the last device section. Its echo means: state loaded, hooks run (§4).
pub const PREPARE_PING: u32 = 0x5354_4e03;
/// Sent after the compatibility section. Its echo means that the record was accepted (§3).
pub const COMPATIBILITY_PING: u32 = 0x5354_4e04;
/// Sent on an idle channel, so that the peer's silence limit does not expire (§5).
pub const KEEPALIVE_PING: u32 = 0x5354_4e05;

/// Announces device streams that are sent while the guest runs, within the destination's grants (§8).
pub const DEVICE_STREAMS_PING: u32 = 0x5354_4e06;

/// Announces that the source reconnects if this connection is lost.
///
/// The echo means that the destination waits for the new connection (§13).
pub const RECONNECT_PING: u32 = 0x5354_4e09;
/// Sent at the end of every round, after [`RECONNECT_PING`]. Its echo acknowledges the round's pages.
///
/// The echo means that the destination has stored every page of the round (§13).
pub const ROUND_PING: u32 = 0x5354_4e0a;

/// Like [`DEVICE_STREAMS_PING`], in a session that replaces a lost one (§8).
///
/// Each device stream restarts from its beginning.
pub const STREAMS_ANEW_PING: u32 = 0x5354_4e0b;

/// Announces that guest memory follows as file descriptors, over a separate connection.
///
/// The echo means that the destination waits for that connection (§11).
pub const MEMORY_PING: u32 = 0x5354_4e10;

/// Sent after the section with the source's configuration.
///
/// The echo means that the destination has made its VM from it (§15).
pub const CONFIGURATION_PING: u32 = 0x5354_4e11;

/// Sent after RUN in postcopy. Its echo means: guest started, or taken over paused (§12).
pub const POSTCOPY_STARTED_PING: u32 = 0x5354_4e20;

/// SHUT value in postcopy: an operator paused it at the destination (`migrate-pause`).
///
/// The source does not reconnect automatically.
pub const SHUT_PAUSED: u32 = 2;
/// SHUT value in postcopy: the destination failed to place the same page twice.
///
/// Also sent if it failed to place more than 16 pages (§14). The source does not reconnect automatically.
pub const SHUT_PAGE_FAILED: u32 = 3;

/// Name of the section with the compatibility record (§3).
///
/// The section's version is the record's version. The body is framed by a u32 length.
pub const COMPATIBILITY_SECTION: &str = "sterna/compatibility";

/// 16 bits: the extensions that a destination supports (§1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features(pub u16);

impl Features {
    const MARK: u32 = 0x5346_0000;

    /// Device streams while the guest runs, within grants (§8).
    pub const DEVICE_STREAMS: Features = Features(0x0002);
    /// Handover section and status question in version 2, with a secret. Version 1 used bit 0.
    pub const HANDOVER: Features = Features(0x0004);
    /// Guest memory as file descriptors (§11).
    pub const MEMORY: Features = Features(0x0100);
    /// The destination has no VM yet, and makes it from the source's configuration (§15).
    ///
    /// It sets no other bit then. The source asks again when the VM exists.
    pub const CONFIGURATION: Features = Features(0x0200);
    /// `postcopy-ram` is on: the guest may run before all pages have arrived (§12).
    ///
    /// A destination sets this bit per migration, from its capabilities.
    pub const POSTCOPY: Features = Features(0x0010);
    /// Like [`Features::POSTCOPY`], for a preempt channel: `postcopy-preempt` is on.
    pub const PREEMPT: Features = Features(0x0020);
    /// The source may replace a lost connection (§13).
    ///
    /// Only a destination that can wait for its source sets this bit.
    pub const RECONNECT: Features = Features(0x0040);
    /// Like [`Features::POSTCOPY`], with pages over multifd channels while the guest runs: `multifd` is on too.
    pub const POSTCOPY_LANES: Features = Features(0x0080);
    /// The features of this version that do not depend on the migration's settings.
    pub const OURS: Features = Features(Self::HANDOVER.0 | Self::DEVICE_STREAMS.0 | Self::MEMORY.0);

    /// Whether all bits of `other` are set in `self`.
    pub fn contains(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }

    /// The bits that are set in at least one of the two.
    #[must_use]
    pub fn union(self, other: Features) -> Features {
        Features(self.0 | other.0)
    }

    /// The bits that are set in both.
    #[must_use]
    pub fn intersection(self, other: Features) -> Features {
        Features(self.0 & other.0)
    }

    /// The PONG value that announces these features.
    pub fn to_pong(self) -> u32 {
        Self::MARK | u32::from(self.0)
    }

    /// The features in a PONG value; `None` for an ordinary PONG.
    pub fn from_pong(value: u32) -> Option<Self> {
        (value & 0xffff_0000 == Self::MARK).then_some(Features(value as u16))
    }
}
