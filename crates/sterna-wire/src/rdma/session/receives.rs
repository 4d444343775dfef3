//! Receives to post, and the errors of both sides' state machines.

use crate::error::WireError;
use crate::rdma::message_type::MessageType;

pub(super) const TOKENS: &str = "specs/rdma.md §3.3";
pub(super) const PHASES: &str = "specs/rdma.md §5.3";
pub(super) const END: &str = "specs/rdma.md §7";

/// Permission to send a message, after `receives` receives have been posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "the receives have to be posted before the message is sent"]
pub struct Sending {
    /// Number of receives to post first, each of [`MESSAGE_BYTES`](crate::rdma::MESSAGE_BYTES).
    pub receives: usize,
}

/// Number of posted receives, and the number required.
#[derive(Debug, Clone, Copy)]
pub(super) struct Receives {
    pub(super) posted: usize,
    /// Receives beyond the required number. A message too many then causes a named error instead of breaking
    /// the queue pair.
    pub(super) spare: usize,
}

impl Receives {
    pub(super) fn new(spare: usize) -> Self {
        Self { posted: 0, spare }
    }

    /// Number of receives to post so that `expected` messages can arrive.
    pub(super) fn post_for(&mut self, expected: usize) -> usize {
        let missing = (expected + self.spare).saturating_sub(self.posted);
        self.posted += missing;
        missing
    }

    pub(super) fn used(&mut self, kind: MessageType) -> Result<(), WireError> {
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
pub(super) const TYPE_FIELD: u64 = 4;

pub(super) fn misbehaved(kind: MessageType, paragraph: &'static str, rule: impl Into<String>) -> WireError {
    WireError::misbehaved(kind.name(), TYPE_FIELD, paragraph, rule.into())
}

pub(super) fn local(kind: MessageType, paragraph: &'static str, rule: impl Into<String>) -> WireError {
    WireError::local(kind.name(), TYPE_FIELD, paragraph, rule.into())
}
