//! The seven messages of COLO and their encoding (`specs/colo.md §2`).

use std::fmt;

use crate::error::WireError;
use crate::limits::DEVICE_STATE_BYTES;
use crate::reader;

pub(super) const MESSAGE: &str = "COLO message";
const SPEC: &str = "specs/colo.md §2";

/// One message of COLO, in either direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Message {
    /// Standby to primary: the seeding is held, and the primary may start checkpoints.
    CheckpointReady,
    /// Primary to standby: the primary wants to start a checkpoint.
    CheckpointRequest,
    /// Standby to primary: the standby is ready for the checkpoint.
    CheckpointReply,
    /// Primary to standby: the guest is paused, and RAM follows.
    VmstateSend,
    /// Primary to standby: `bytes` bytes of device state follow.
    VmstateSize {
        /// At least 1, at most [`DEVICE_STATE_BYTES`].
        bytes: u64,
    },
    /// Standby to primary: the whole checkpoint is held. The primary may release the output of that epoch.
    VmstateReceived,
    /// Standby to primary: the primary may resume the guest.
    VmstateLoaded,
}

/// The type of a [`Message`], without its fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MessageKind {
    /// Kind of [`Message::CheckpointReady`], number 0 on the wire.
    CheckpointReady = 0,
    /// Kind of [`Message::CheckpointRequest`], number 1 on the wire.
    CheckpointRequest = 1,
    /// Kind of [`Message::CheckpointReply`], number 2 on the wire.
    CheckpointReply = 2,
    /// Kind of [`Message::VmstateSend`], number 3 on the wire.
    VmstateSend = 3,
    /// Kind of [`Message::VmstateSize`], number 4 on the wire.
    VmstateSize = 4,
    /// Kind of [`Message::VmstateReceived`], number 5 on the wire.
    VmstateReceived = 5,
    /// Kind of [`Message::VmstateLoaded`], number 6 on the wire.
    VmstateLoaded = 6,
}

impl MessageKind {
    /// Every kind, in the order of the numbers on the wire.
    pub const ALL: [Self; 7] = [
        Self::CheckpointReady,
        Self::CheckpointRequest,
        Self::CheckpointReply,
        Self::VmstateSend,
        Self::VmstateSize,
        Self::VmstateReceived,
        Self::VmstateLoaded,
    ];

    /// The name in the specification, such as `CHECKPOINT_READY`.
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
    /// Longest message, in bytes.
    pub const MAX_BYTES: usize = 12;

    /// The type of this message.
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

    /// Reads one message from the start of `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// A number other than 0 to 6; a size of 0 or above [`DEVICE_STATE_BYTES`].
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
                None => return Err(r.bad(SPEC, format!("message {number}; only 0 to 6 are known"))),
            })
        })
    }
}

/// The rule that a size of device state breaks; `None` for a valid size.
fn broken_rule(bytes: u64) -> Option<String> {
    match bytes {
        0 => Some("VMSTATE_SIZE of 0 bytes, but device state has at least its end (00)".to_owned()),
        1..=DEVICE_STATE_BYTES => None,
        _ => Some(format!("VMSTATE_SIZE of {bytes} bytes, more than {DEVICE_STATE_BYTES}")),
    }
}
