//! The messages (`specs/colo.md §2`).

use std::fmt;

use crate::error::WireError;
use crate::limits::DEVICE_STATE_BYTES;
use crate::reader;

pub(super) const MESSAGE: &str = "COLO message";
const SPEC: &str = "specs/colo.md §2";

/// One message of COLO, in either direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Message {
    /// Standby: the seeding is held, and checkpoints may come.
    CheckpointReady,
    /// Primary: a checkpoint is due.
    CheckpointRequest,
    /// Standby: send it.
    CheckpointReply,
    /// Primary: the guest is stopped, and RAM follows.
    VmstateSend,
    /// Primary: so many bytes of device state follow.
    VmstateSize {
        /// At least 1, at most [`DEVICE_STATE_BYTES`].
        bytes: u64,
    },
    /// Standby: all of the checkpoint is held. The primary lets go of the output that was held back.
    VmstateReceived,
    /// Standby: the guest may go on.
    VmstateLoaded,
}

/// A message without what it carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MessageKind {
    /// See [`Message::CheckpointReady`].
    CheckpointReady = 0,
    /// See [`Message::CheckpointRequest`].
    CheckpointRequest = 1,
    /// See [`Message::CheckpointReply`].
    CheckpointReply = 2,
    /// See [`Message::VmstateSend`].
    VmstateSend = 3,
    /// See [`Message::VmstateSize`].
    VmstateSize = 4,
    /// See [`Message::VmstateReceived`].
    VmstateReceived = 5,
    /// See [`Message::VmstateLoaded`].
    VmstateLoaded = 6,
}

impl MessageKind {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 7] = [
        Self::CheckpointReady,
        Self::CheckpointRequest,
        Self::CheckpointReply,
        Self::VmstateSend,
        Self::VmstateSize,
        Self::VmstateReceived,
        Self::VmstateLoaded,
    ];

    /// The protocol's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::CheckpointReady => "CHECKPOINT_READY",
            Self::CheckpointRequest => "CHECKPOINT_REQUEST",
            Self::CheckpointReply => "CHECKPOINT_REPLY",
            Self::VmstateSend => "VMSTATE_SEND",
            Self::VmstateSize => "VMSTATE_SIZE",
            Self::VmstateReceived => "VMSTATE_RECEIVED",
            Self::VmstateLoaded => "VMSTATE_LOADED",
        }
    }
}

impl fmt::Display for MessageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Message {
    /// Most bytes that one message takes.
    pub const MAX_BYTES: usize = 12;

    /// Which message it is.
    pub fn kind(&self) -> MessageKind {
        match self {
            Self::CheckpointReady => MessageKind::CheckpointReady,
            Self::CheckpointRequest => MessageKind::CheckpointRequest,
            Self::CheckpointReply => MessageKind::CheckpointReply,
            Self::VmstateSend => MessageKind::VmstateSend,
            Self::VmstateSize { .. } => MessageKind::VmstateSize,
            Self::VmstateReceived => MessageKind::VmstateReceived,
            Self::VmstateLoaded => MessageKind::VmstateLoaded,
        }
    }

    /// Appends the bytes on the wire.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) when a size is 0 or more than [`DEVICE_STATE_BYTES`].
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        if let Self::VmstateSize { bytes } = self
            && let Some(rule) = broken_rule(*bytes)
        {
            return Err(WireError::local(MESSAGE, 4, SPEC, rule));
        }
        out.extend_from_slice(&(self.kind() as u32).to_be_bytes());
        if let Self::VmstateSize { bytes } = self {
            out.extend_from_slice(&bytes.to_be_bytes());
        }
        Ok(())
    }

    /// Reads one from the start of `buf`; `None` until all of it is there.
    ///
    /// # Errors
    /// A number that no message has; a size of 0 or of more than [`DEVICE_STATE_BYTES`].
    pub fn decode(buf: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, MESSAGE, |r| {
            let number = r.u32()?;
            let kind = MessageKind::ALL.into_iter().find(|kind| *kind as u32 == number);
            Ok(match kind {
                Some(MessageKind::CheckpointReady) => Self::CheckpointReady,
                Some(MessageKind::CheckpointRequest) => Self::CheckpointRequest,
                Some(MessageKind::CheckpointReply) => Self::CheckpointReply,
                Some(MessageKind::VmstateSend) => Self::VmstateSend,
                Some(MessageKind::VmstateSize) => {
                    let bytes = r.u64()?;
                    if let Some(rule) = broken_rule(bytes) {
                        return Err(r.bad(SPEC, rule));
                    }
                    Self::VmstateSize { bytes }
                }
                Some(MessageKind::VmstateReceived) => Self::VmstateReceived,
                Some(MessageKind::VmstateLoaded) => Self::VmstateLoaded,
                None => return Err(r.bad(SPEC, format!("message {number}, and there are 0 to 6"))),
            })
        })
    }
}

/// Why no device state has so many bytes.
fn broken_rule(bytes: u64) -> Option<String> {
    match bytes {
        0 => Some("VMSTATE_SIZE of 0 bytes: device state has at least its end (00)".to_owned()),
        1..=DEVICE_STATE_BYTES => None,
        _ => Some(format!("VMSTATE_SIZE of {bytes} bytes, more than {DEVICE_STATE_BYTES}")),
    }
}
