//! The order of messages at the standby (`specs/colo.md §3`).
//!
//! [`StandbyOrder`] is a pure state machine. It sends and receives nothing itself.

use crate::error::{Fault, WireError};

use super::message::{MESSAGE, Message, MessageKind};

const SPEC: &str = "specs/colo.md §3";

/// The next step of the protocol, and the side that performs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// The standby sends this message.
    Say(MessageKind),
    /// The primary sends this message.
    Hear(MessageKind),
    /// The primary sends RAM: the END section and `00`.
    Ram,
    /// The primary sends `bytes` bytes of device state.
    Devices {
        /// Bytes of device state, as VMSTATE_SIZE stated.
        bytes: u64,
    },
}

/// A step other than the next one of the protocol. The state does not change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    /// The primary broke the order.
    #[error("the primary sent {came} instead of {expected}: start the protection again")]
    Heard {
        /// The message that the primary sent.
        came: MessageKind,
        /// The message that the protocol requires here.
        expected: MessageKind,
    },
    /// The primary sent a message where none of its messages was due.
    ///
    /// The standby had to send one, or RAM or devices were due.
    #[error("the primary sent {came} out of turn (instead of {due:?}): start the protection again")]
    OutOfTurn {
        /// The message that the primary sent.
        came: MessageKind,
        /// The step that the protocol requires here.
        due: Due,
    },
    /// The standby's own code tried a step that the protocol does not allow here.
    #[error("this side was about to do {tried} instead of {due:?}")]
    Own {
        /// Name of the refused step.
        tried: &'static str,
        /// The step that the protocol requires here.
        due: Due,
    },
}

impl From<OrderError> for WireError {
    fn from(error: OrderError) -> Self {
        let rule = error.to_string();
        match error.fault() {
            Fault::Local => WireError::local(MESSAGE, 0, SPEC, rule),
            _ => WireError::misbehaved(MESSAGE, 0, SPEC, rule),
        }
    }
}

impl OrderError {
    /// The side that broke the order.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Heard { .. } | Self::OutOfTurn { .. } => Fault::PeerMisbehaved,
            Self::Own { .. } => Fault::Local,
        }
    }
}

/// The order at the standby, from the acknowledgement of the seeding on.
///
/// This type has no connection. The owner of the connection reports each received message, and asks before it
/// sends one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StandbyOrder {
    due: Due,
}

impl Default for StandbyOrder {
    fn default() -> Self {
        Self::new()
    }
}

impl StandbyOrder {
    /// The order after SHUT 0: CHECKPOINT_READY is the next step.
    pub fn new() -> Self {
        Self { due: Due::Say(MessageKind::CheckpointReady) }
    }

    /// The next step, and the side that performs it.
    pub fn due(&self) -> Due {
        self.due
    }

    /// Whether the primary may be silent: it decides when it requests the next checkpoint.
    pub fn may_rest(&self) -> bool {
        self.due == Due::Hear(MessageKind::CheckpointRequest)
    }

    /// Asks to send `kind`. On success the message counts as sent.
    ///
    /// # Errors
    /// [`OrderError::Own`]: another step is due.
    pub fn say(&mut self, kind: MessageKind) -> Result<(), OrderError> {
        if self.due != Due::Say(kind) {
            return Err(OrderError::Own { tried: kind.name(), due: self.due });
        }
        self.due = match kind {
            MessageKind::CheckpointReply => Due::Hear(MessageKind::VmstateSend),
            MessageKind::VmstateReceived => Due::Say(MessageKind::VmstateLoaded),
            // Only READY and LOADED remain: no other message is ever due from this side.
            _ => Due::Hear(MessageKind::CheckpointRequest),
        };
        Ok(())
    }

    /// Records a message that the primary sent.
    ///
    /// # Errors
    /// [`OrderError::Heard`]: another message is due. [`OrderError::OutOfTurn`]: no message of the primary is
    /// due.
    pub fn heard(&mut self, message: &Message) -> Result<(), OrderError> {
        let came = message.kind();
        match self.due {
            Due::Hear(expected) if expected != came => Err(OrderError::Heard { came, expected }),
            Due::Hear(_) => {
                self.due = match message {
                    Message::VmstateSend => Due::Ram,
                    Message::VmstateSize { bytes } => Due::Devices { bytes: *bytes },
                    // Only REQUEST remains: no other message is ever due from the primary.
                    _ => Due::Say(MessageKind::CheckpointReply),
                };
                Ok(())
            }
            due => Err(OrderError::OutOfTurn { came, due }),
        }
    }

    /// Records that RAM has been read, including its `00`.
    ///
    /// # Errors
    /// [`OrderError::Own`]: RAM is not due.
    pub fn ram_came(&mut self) -> Result<(), OrderError> {
        if self.due != Due::Ram {
            return Err(OrderError::Own { tried: "the end of RAM", due: self.due });
        }
        self.due = Due::Hear(MessageKind::VmstateSize);
        Ok(())
    }

    /// Records that the whole checkpoint is stored and checked. VMSTATE_RECEIVED becomes the next step.
    ///
    /// # Errors
    /// [`OrderError::Own`]: the devices are not due.
    pub fn checkpoint_is_held(&mut self) -> Result<(), OrderError> {
        if !matches!(self.due, Due::Devices { .. }) {
            return Err(OrderError::Own { tried: "the end of the devices", due: self.due });
        }
        self.due = Due::Say(MessageKind::VmstateReceived);
        Ok(())
    }
}
