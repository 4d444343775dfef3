//! What two Sternas say to each other beyond QEMU's format (`specs/extension.md`).
//!
//! Nothing of this goes out before the destination has shown that it is a Sterna: the source sends two PINGs,
//! [`EXTENSION_PING`] and [`FENCE_PING`]. Every destination echoes both; a Sterna adds, before the fence's echo,
//! a PONG that [`Features::from_pong`] recognises. When the fence's echo is there, the source knows.

mod handover;
mod memory;
mod preempt;
mod reconnect;
mod secret;
mod status;

pub use handover::Handover;
pub use memory::{HandedOver, MemoryAnswer, MemoryOffer};
pub use preempt::PreemptHello;
pub use reconnect::{
    Holds, ReconnectAnswer, ReconnectAnswerHead, ReconnectChannel, ReconnectHello, decode_held, encode_held,
    most_held_bytes,
};
pub use secret::{MacBytes, MigrationSecret};
pub use status::{ChannelBinding, Status, StatusAnswer, StatusQuestion};

/// "Are you a Sterna?" (§1)
pub const EXTENSION_PING: u32 = 0x5354_4e01;
/// Sent right after it: its echo means that the answer, if any, has come (§1).
pub const FENCE_PING: u32 = 0x5354_4e02;
/// Sent after the last device section: its echo means that all is loaded and the hooks have run (§4).
pub const PREPARE_PING: u32 = 0x5354_4e03;
/// Sent after the compatibility section: its echo means that it was accepted (§3).
pub const COMPATIBILITY_PING: u32 = 0x5354_4e04;
/// Sent while nothing else is, so that a limit on silence does not strike (§5).
pub const KEEPALIVE_PING: u32 = 0x5354_4e05;

/// Says that devices' streams will move while the guest runs, and only as far as they are granted (§8).
pub const DEVICE_STREAMS_PING: u32 = 0x5354_4e06;

/// Says that the source comes back over another connection if this one is lost: its echo means that this side waits for it (§13).
pub const RECONNECT_PING: u32 = 0x5354_4e09;
/// Sent at the end of every round by a source that has sent [`RECONNECT_PING`]: its echo means that all pages of the round are held
/// (§13).
pub const ROUND_PING: u32 = 0x5354_4e0a;

/// As [`DEVICE_STREAMS_PING`], in a session that takes the place of a lost one: the streams begin anew (§8).
pub const STREAMS_ANEW_PING: u32 = 0x5354_4e0b;

/// Says that the guest's memory will come as descriptors, over a connection of its own: its echo means that this side waits for it
/// (§11).
pub const MEMORY_PING: u32 = 0x5354_4e10;

/// Sent after RUN in postcopy: its echo means that the guest was started, or taken over paused (§12).
pub const POSTCOPY_STARTED_PING: u32 = 0x5354_4e20;

/// SHUT in postcopy: an operator has paused it at the destination (`migrate-pause`). The source does not connect again by itself.
pub const SHUT_PAUSED: u32 = 2;
/// SHUT in postcopy: the destination cannot place a page, and could not before. The source does not connect again by itself.
pub const SHUT_PAGE_FAILED: u32 = 3;

/// Section with the compatibility record (§3), whose version is the record's own; its body is framed by a u32
/// length.
pub const COMPATIBILITY_SECTION: &str = "sterna/compatibility";

/// What a destination can do beyond QEMU's format: 16 bits (§1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features(pub u16);

impl Features {
    const MARK: u32 = 0x5346_0000;

    /// Devices' streams may move while the guest runs, and are granted room (§8).
    pub const DEVICE_STREAMS: Features = Features(0x0002);
    /// The handover section and the status question are understood in version 2, with a secret. Version 1 had bit 0.
    pub const HANDOVER: Features = Features(0x0004);
    /// The guest's memory may come as descriptors (§11).
    pub const MEMORY: Features = Features(0x0100);
    /// The guest may run before its pages are there: `postcopy-ram` is on (§12). Set by a destination for this migration alone.
    pub const POSTCOPY: Features = Features(0x0010);
    /// As [`Features::POSTCOPY`], for a preempt channel: `postcopy-preempt` is on.
    pub const PREEMPT: Features = Features(0x0020);
    /// A lost connection may be made anew (§13). Not every destination says so: it must be able to wait for its source.
    pub const RECONNECT: Features = Features(0x0040);
    /// As [`Features::POSTCOPY`], for pages over multifd channels while the guest runs: `multifd` is on, too.
    pub const POSTCOPY_LANES: Features = Features(0x0080);
    /// What this version answers, beside what depends on the migration's settings.
    pub const OURS: Features = Features(Self::HANDOVER.0 | Self::DEVICE_STREAMS.0 | Self::MEMORY.0);

    /// Whether all bits of `other` are set here.
    pub fn contains(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }

    /// The bits of both together.
    #[must_use]
    pub fn union(self, other: Features) -> Features {
        Features(self.0 | other.0)
    }

    /// The bits that both have.
    #[must_use]
    pub fn intersection(self, other: Features) -> Features {
        Features(self.0 & other.0)
    }

    /// The PONG value that says so.
    pub fn to_pong(self) -> u32 {
        Self::MARK | u32::from(self.0)
    }

    /// The features that a PONG value states; `None` when it is an ordinary PONG.
    pub fn from_pong(value: u32) -> Option<Self> {
        (value & 0xffff_0000 == Self::MARK).then_some(Features(value as u16))
    }
}
