//! Who may send what, and when: the order of control messages (`specs/rdma.md §3.3`, `§3.4`, `§5.3`, `§7`).
//!
//! These machines hold no connection. Whoever does tells them each message that has come and asks before each that is to
//! go; the answer is how many receives to post first, or the rule that forbids it. They decide by types alone; what
//! messages hold is checked by [`BlockPlaces`](super::BlockPlaces) and by the main channel's decoder.
//!
//! | machine | of which side |
//! | --- | --- |
//! | [`Commander`] | the side that sends commands: tokens |
//! | [`Listener`] | the side that takes them: tokens |
//! | [`SourceSession`] | the source on the main connection: a commander with phases and WRITEs |
//! | [`DestinationSession`] | the destination on it: a listener with phases |
//! | [`LaneSource`], [`LaneDestination`] | both ends of a lane: FILE messages on credit |
//!
//! On the return path the destination is a [`Commander`] of FILE messages and the source a [`Listener`].
//!
//! A rule that the peer breaks is an error of [`PeerMisbehaved`](crate::Fault::PeerMisbehaved), one that this side breaks
//! is [`Local`](crate::Fault::Local), and leaves the machine as it was. A peer that breaks a rule is told nothing: the
//! session is over, disconnect. A side that fails by itself asks `say_error` first.

mod commander;
mod destination;
mod lane;
mod listener;
mod source;

pub use commander::{Commander, Heard};
pub use destination::{Arrival, DestinationSession};
pub use lane::{Credit, LaneDestination, LaneSource};
pub use listener::Listener;
pub use source::{Command, Peer, SourceSession};

use super::header::MessageType;
use crate::error::WireError;

const TOKENS: &str = "specs/rdma.md §3.3";
const PHASES: &str = "specs/rdma.md §5.3";
const END: &str = "specs/rdma.md §7";

/// A message may be sent: post so many receives, then send it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the receives have to be posted before the message is sent"]
pub struct Sending {
    /// Receives to post first, each of [`MESSAGE_BYTES`](super::MESSAGE_BYTES).
    pub receives: usize,
}

/// The receives that are posted, and how many there should be.
#[derive(Debug, Clone, Copy)]
struct Receives {
    posted: usize,
    /// More than the rules ask for: a message too many is then named, instead of breaking the queue pair.
    spare: usize,
}

impl Receives {
    fn new(spare: usize) -> Self {
        Self { posted: 0, spare }
    }

    /// How many to post so that `expected` messages can come.
    fn post_for(&mut self, expected: usize) -> usize {
        let missing = (expected + self.spare).saturating_sub(self.posted);
        self.posted += missing;
        missing
    }

    fn used(&mut self, kind: MessageType) -> Result<(), WireError> {
        match self.posted.checked_sub(1) {
            Some(left) => {
                self.posted = left;
                Ok(())
            }
            None => Err(local(kind, TOKENS, "it came, and no receive was posted for it: call starting()")),
        }
    }
}

/// Where the type stands in a message.
const TYPE_FIELD: u64 = 4;

fn misbehaved(kind: MessageType, paragraph: &'static str, rule: impl Into<String>) -> WireError {
    WireError::misbehaved(kind.name(), TYPE_FIELD, paragraph, rule.into())
}

fn local(kind: MessageType, paragraph: &'static str, rule: impl Into<String>) -> WireError {
    WireError::local(kind.name(), TYPE_FIELD, paragraph, rule.into())
}
