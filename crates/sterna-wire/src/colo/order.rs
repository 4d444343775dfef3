//! The order of messages at the standby (`specs/colo.md §3`).

use crate::error::{Fault, WireError};

use super::message::{MESSAGE, Message, MessageKind};

const SPEC: &str = "specs/colo.md §3";

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// This side says that.
    Say(MessageKind),
    /// The primary says that.
    Hear(MessageKind),
    /// The primary sends RAM: END of the section, and `00`.
    Ram,
    /// The primary sends so many bytes of device state.
    Devices {
        /// How many.
        bytes: u64,
    },
}

/// A step that is not the one that is due. The machine is as it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    /// The primary broke the order.
    #[error("the primary said {came}, and {expected} was due: start the protection anew")]
    Heard {
        /// The message that came.
        came: MessageKind,
        /// What was due from it.
        expected: MessageKind,
    },
    /// The primary spoke while it was this side's turn, or while RAM or devices were due.
    #[error("the primary said {came} out of turn ({due:?} was due): start the protection anew")]
    OutOfTurn {
        /// The message that came.
        came: MessageKind,
        /// What was due.
        due: Due,
    },
    /// This side was about to break the order.
    #[error("this side was about to do {tried}, and {due:?} was due")]
    Own {
        /// What it was about to do.
        tried: &'static str,
        /// What was due.
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
    /// Who broke the order.
    pub fn fault(&self) -> Fault {
        match self {
            Self::Heard { .. } | Self::OutOfTurn { .. } => Fault::PeerMisbehaved,
            Self::Own { .. } => Fault::Local,
        }
    }
}

/// The order at the standby, from the acknowledgement of the seeding on. It holds no connection: whoever does tells it
/// each message that came and asks before each that is to go.
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
    /// The order behind SHUT 0: CHECKPOINT_READY is due.
    pub fn new() -> Self {
        Self { due: Due::Say(MessageKind::CheckpointReady) }
    }

    /// What is due.
    pub fn due(&self) -> Due {
        self.due
    }

    /// Whether the primary owes nothing: it asks for the next checkpoint when it likes.
    pub fn may_rest(&self) -> bool {
        self.due == Due::Hear(MessageKind::CheckpointRequest)
    }

    /// Asks to say `kind`. Afterwards it counts as said.
    ///
    /// # Errors
    /// [`OrderError::Own`]: something else is due.
    pub fn say(&mut self, kind: MessageKind) -> Result<(), OrderError> {
        if self.due != Due::Say(kind) {
            return Err(OrderError::Own { tried: kind.name(), due: self.due });
        }
        self.due = match kind {
            MessageKind::CheckpointReply => Due::Hear(MessageKind::VmstateSend),
            MessageKind::VmstateReceived => Due::Say(MessageKind::VmstateLoaded),
            // READY and LOADED: nothing else is ever due to be said.
            _ => Due::Hear(MessageKind::CheckpointRequest),
        };
        Ok(())
    }

    /// Takes a message of the primary.
    ///
    /// # Errors
    /// [`OrderError::Heard`], [`OrderError::OutOfTurn`].
    pub fn heard(&mut self, message: &Message) -> Result<(), OrderError> {
        let came = message.kind();
        match self.due {
            Due::Hear(expected) if expected != came => Err(OrderError::Heard { came, expected }),
            Due::Hear(_) => {
                self.due = match message {
                    Message::VmstateSend => Due::Ram,
                    Message::VmstateSize { bytes } => Due::Devices { bytes: *bytes },
                    // REQUEST: nothing else is ever due to be heard.
                    _ => Due::Say(MessageKind::CheckpointReply),
                };
                Ok(())
            }
            due => Err(OrderError::OutOfTurn { came, due }),
        }
    }

    /// RAM has come, its `00` included.
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

    /// All of the checkpoint is here, checked and held: the promise may be made.
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
