//! The order of RDMA control messages (`specs/rdma.md §3.3`, `§3.4`, `§5.3`, `§7`).
//!
//! These state machines have no connection. The owner of the connection reports each received message, and asks
//! before it sends one. The answer is the number of receives to post first, or the rule that forbids the
//! message. The machines decide only by message types. [`BlockPlaces`](super::BlockPlaces) and the main
//! channel's decoder check the content.
//!
//! | machine | side |
//! | --- | --- |
//! | [`Commander`] | the side that sends commands: READYs and answers |
//! | [`Listener`] | the side that receives commands: READYs and answers |
//! | [`SourceSession`] | the source on the main connection: a commander with phases and WRITEs |
//! | [`DestinationSession`] | the destination on the main connection: a listener with phases |
//! | [`LaneSource`], [`LaneDestination`] | both ends of a lane: FILE messages with credit |
//!
//! On the return path the destination is a [`Commander`] of FILE messages and the source a [`Listener`].
//!
//! If the peer breaks a rule, the error is [`PeerMisbehaved`](crate::Fault::PeerMisbehaved). The session is
//! then over: disconnect without sending ERROR. If this side breaks a rule, the error is
//! [`Local`](crate::Fault::Local), and the state does not change. A side that fails for another reason calls
//! `say_error` first.

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

/// Permission to send a message, after `receives` receives have been posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the receives have to be posted before the message is sent"]
pub struct Sending {
    /// Number of receives to post first, each of [`MESSAGE_BYTES`](super::MESSAGE_BYTES).
    pub receives: usize,
}

/// Number of posted receives, and the number required.
#[derive(Debug, Clone, Copy)]
struct Receives {
    posted: usize,
    /// Receives beyond the required number. A message too many then causes a named error instead of breaking
    /// the queue pair.
    spare: usize,
}

impl Receives {
    fn new(spare: usize) -> Self {
        Self { posted: 0, spare }
    }

    /// Number of receives to post so that `expected` messages can arrive.
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
            None => Err(local(kind, TOKENS, "it arrived, but no receive was posted for it: call starting()")),
        }
    }
}

/// Offset of the type in a message, in bytes.
const TYPE_FIELD: u64 = 4;

fn misbehaved(kind: MessageType, paragraph: &'static str, rule: impl Into<String>) -> WireError {
    WireError::misbehaved(kind.name(), TYPE_FIELD, paragraph, rule.into())
}

fn local(kind: MessageType, paragraph: &'static str, rule: impl Into<String>) -> WireError {
    WireError::local(kind.name(), TYPE_FIELD, paragraph, rule.into())
}
