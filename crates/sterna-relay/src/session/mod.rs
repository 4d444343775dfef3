//! One session between two relays, as a state machine without I/O and without a clock (`specs/relay.md §4` to §9).
//!
//! The caller moves bytes between the VMMs' connections and the session, and frames between the session and the
//! carriers. It passes the time since any fixed moment with each call that needs it. After each call it takes the
//! [`Event`]s.
//!
//! | step | calls |
//! | --- | --- |
//! | a VMM connects (dialer) | [`Session::open`] |
//! | a flow arrives (acceptor) | [`Event::Connect`]; the caller connects to its VMM |
//! | bytes from the VMM | [`Session::room`], [`Session::take`]; [`Session::finish`], [`Session::reset`] at the end |
//! | bytes for the VMM | [`Event::Deliver`], [`Session::next_delivery`], [`Session::delivered`]; [`Session::stop`] if it broke |
//! | a carrier is there, or lost | [`Session::carrier_up`], [`Session::carrier_down`] |
//! | frames | [`Session::next_frame`], [`Session::receive`] |
//! | PACKED frames | the caller packs DATA and unpacks it ([`pack`](crate::pack)); [`Session::missing`] |
//! | time | [`Session::tick`], [`Session::next_tick`] |
//!
//! Memory: at most [`Settings::buffer_bytes`] that wait to be sent or acknowledged, and as many that were received
//! and are not delivered yet.

mod buffers;
mod carriers;
mod error;
mod flow;
mod incoming;
mod local;
mod opening;
mod outgoing;
mod outgoing_frame;
mod piece;
mod rate;
mod receive;
mod schedule;
mod settings;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::frame::{Frame, SessionId, Verdict};

pub use buffers::Buffers;
pub use carriers::CarrierId;
pub use error::SessionError;
pub use incoming::Delivery;
pub use opening::Opening;
pub use outgoing::{End, Priority};
pub use outgoing_frame::{OutgoingFrame, PackingHint};
pub use piece::Piece;
pub use rate::{RateEstimator, Stamp};
#[cfg(feature = "sim")]
pub use settings::Planted;
pub use settings::{MOST_FLOWS, Settings};

use carriers::Carriers;
use flow::Flow;

/// The place of a relay in its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It connects carriers and opens flows: the relay at the source.
    Dialer,
    /// It accepts carriers: the relay at the destination.
    Acceptor,
}

/// News for the caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Connect to the VMM for this flow. The flows come in the order of their numbers.
    Connect(u32),
    /// There is something to deliver on this flow.
    Deliver(u32),
    /// The peer takes no more bytes of this flow: read its VMM no more.
    Stopped(u32),
    /// The flow is over at this side, and forgotten.
    Gone(u32),
    /// Some flow may take bytes again.
    Room,
    /// Some carrier has a frame to send.
    Send,
    /// This carrier is too silent, or was replaced: close it.
    Close(CarrierId),
    /// The peer has ended the session.
    Over(Verdict, String),
}

/// The acknowledgement for a forgotten flow: flow, length, whether of FINISH, whether of STOP.
type Late = (u32, u64, bool, bool);

/// The state of one session at one relay.
#[derive(Debug)]
pub struct Session {
    id: SessionId,
    role: Role,
    settings: Settings,
    flows: BTreeMap<u32, Flow>,
    /// All flows up to this number have been opened, in order.
    opened_through: u32,
    carriers: Carriers,
    rate: RateEstimator,
    /// Bytes taken and not acknowledged, over all flows.
    stored: u64,
    /// By how much the windows of flows have grown, in bytes.
    grown: u64,
    /// Acknowledgements for flows that are forgotten.
    late: Vec<Late>,
    /// The last acknowledgement of each of the last forgotten flows. No flow is left that would send it again after a loss.
    parted: VecDeque<Late>,
    /// The flow that sent last.
    turn: u32,
    /// The relays have agreed on PACKED frames.
    packs: bool,
    /// HAVE frames that wait.
    announcements: VecDeque<Frame>,
    /// The peer has sent SYNC on some carrier.
    has_synced: bool,
    over: Option<(Verdict, String)>,
    /// The peer's OVER.
    peer_over: Option<(Verdict, String)>,
    events: Vec<Event>,
    counters: Counters,
}

/// Sums over the life of a session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes taken from this side's VMM.
    pub taken: u64,
    /// Bytes delivered to this side's VMM.
    pub delivered: u64,
    /// Bytes of flows that were sent a second time.
    pub resent: u64,
    /// Bytes of flows in the frames that were sent, repetitions included.
    pub sent: u64,
    /// Carriers that were lost.
    pub lost_carriers: u64,
    /// Flows that were opened.
    pub flows: u64,
    /// Frames that came without a page to which they refer, or that the peer asked for because of that.
    pub misses: u64,
}

impl Session {
    /// A session without flows and carriers.
    pub fn new(id: SessionId, role: Role, settings: Settings) -> Self {
        Self {
            id,
            role,
            flows: BTreeMap::new(),
            opened_through: 0,
            carriers: Carriers::default(),
            rate: RateEstimator::new(),
            stored: 0,
            grown: 0,
            late: Vec::new(),
            parted: VecDeque::new(),
            turn: 0,
            packs: false,
            announcements: VecDeque::new(),
            has_synced: false,
            over: None,
            peer_over: None,
            events: Vec::new(),
            counters: Counters::default(),
            settings,
        }
    }

    /// The session's name.
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// Takes the news since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Sums so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Number of flows that are not over.
    pub fn open_flows(&self) -> usize {
        self.flows.len()
    }

    /// The measured rate in bytes per second, and the limit of bytes in flight.
    pub fn rate(&self) -> (u64, u64) {
        (self.rate.bytes_per_second(), self.rate.limit())
    }

    /// Bytes that this side keeps: not acknowledged, and not delivered.
    pub fn held_bytes(&self) -> (u64, u64) {
        (self.stored, self.flows.values().map(|flow| flow.incoming.waiting()).sum())
    }

    /// Whether a flow without priority has something to send on this carrier now.
    pub fn has_bulk(&self, id: CarrierId, now: Duration) -> bool {
        let packs = self.packs && self.role == Role::Dialer;
        self.flows.iter().any(|(number, flow)| {
            let is_bulk = flow.outgoing.priority == Priority::Bulk && flow.has_work(packs, now);
            is_bulk && self.carrier_of(*number, flow) == Some(id)
        })
    }

    /// Ends the session: every carrier sends OVER as its last frame.
    pub fn end(&mut self, verdict: Verdict, text: &str) {
        let mut most = text.len().min(crate::frame::TEXT_BYTES);
        while !text.is_char_boundary(most) {
            most -= 1;
        }
        if self.over.is_none() {
            self.over = Some((verdict, text[..most].to_owned()));
            self.events.push(Event::Send);
        }
    }

    /// Whether this side or the peer has ended the session.
    pub fn is_over(&self) -> bool {
        self.over.is_some() || self.peer_over.is_some()
    }

    /// Acts on time that has passed: probes silent carriers, and gives up those that do not answer.
    pub fn tick(&mut self, now: Duration) {
        let (send, close) = self.carriers.tick(now);
        if send {
            self.events.push(Event::Send);
        }
        self.events.extend(close.into_iter().map(Event::Close));
    }

    /// When [`tick`](Self::tick) has to be called next; `None` without carriers.
    pub fn next_tick(&self) -> Option<Duration> {
        self.carriers.next_tick()
    }

    fn forget_if_over(&mut self, number: u32) {
        let is_over = self.flows.get(&number).is_some_and(Flow::is_over);
        if is_over && let Some(flow) = self.flows.remove(&number) {
            self.grown -= flow.incoming.grown();
            self.stored -= flow.outgoing.stored();
            // The peer waits for the acknowledgement of its end.
            if !settings::has_bug!(self.settings, ForgetsLastAcknowledgement) {
                let late = (number, flow.incoming.received, true, flow.incoming.has_stop_received);
                self.parted.push_back(late);
                self.parted.drain(..self.parted.len().saturating_sub(MOST_FLOWS));
                if flow.incoming.is_ack_due {
                    self.late.push(late);
                    self.events.push(Event::Send);
                }
            }
            self.events.push(Event::Gone(number));
        }
    }

    /// Whether the flow was opened once, and is over.
    fn is_forgotten(&self, number: u32) -> bool {
        number <= self.opened_through && !self.flows.contains_key(&number)
    }
}
