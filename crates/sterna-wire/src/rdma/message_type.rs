//! Types of control messages (`specs/rdma.md §3.2`).

use std::fmt;

/// Type of a control message. Type 0 is never sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MessageType {
    /// The sender has failed.
    Error = 1,
    /// The listener accepts one more command.
    Ready = 2,
    /// Bytes of the migration stream, or of the return path.
    File = 3,
    /// Asks for the positions of the blocks.
    RamBlocksRequest = 4,
    /// The positions of the blocks.
    RamBlocksResult = 5,
    /// A range contains only zeros.
    Compress = 6,
    /// Asks to register memory, so that the source can write to it.
    RegisterRequest = 7,
    /// The key of the registered memory.
    RegisterResult = 8,
    /// The phase is over.
    RegisterFinished = 9,
    /// Asks to deregister memory.
    UnregisterRequest = 10,
    /// The memory is deregistered.
    UnregisterFinished = 11,
}

impl MessageType {
    /// Every type, in the order of the numbers on the wire.
    pub const ALL: [Self; 11] = [
        Self::Error,
        Self::Ready,
        Self::File,
        Self::RamBlocksRequest,
        Self::RamBlocksResult,
        Self::Compress,
        Self::RegisterRequest,
        Self::RegisterResult,
        Self::RegisterFinished,
        Self::UnregisterRequest,
        Self::UnregisterFinished,
    ];

    /// The number on the wire.
    pub fn code(self) -> u32 {
        self as u32
    }

    /// The type with this number; `None` for an unknown number.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }

    /// The name in errors and traces, such as `RAM_BLOCKS_REQUEST`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "ERROR",
            Self::Ready => "READY",
            Self::File => "FILE",
            Self::RamBlocksRequest => "RAM_BLOCKS_REQUEST",
            Self::RamBlocksResult => "RAM_BLOCKS_RESULT",
            Self::Compress => "COMPRESS",
            Self::RegisterRequest => "REGISTER_REQUEST",
            Self::RegisterResult => "REGISTER_RESULT",
            Self::RegisterFinished => "REGISTER_FINISHED",
            Self::UnregisterRequest => "UNREGISTER_REQUEST",
            Self::UnregisterFinished => "UNREGISTER_FINISHED",
        }
    }

    /// Whether the sender must have received a READY first.
    pub fn is_command(self) -> bool {
        !matches!(self, Self::Error | Self::Ready) && !self.is_answer()
    }

    /// Whether this type answers a command.
    pub fn is_answer(self) -> bool {
        matches!(self, Self::RamBlocksResult | Self::RegisterResult | Self::UnregisterFinished)
    }

    /// The type of the answer to this command; `None` if it has no answer.
    pub fn answer(self) -> Option<Self> {
        match self {
            Self::RamBlocksRequest => Some(Self::RamBlocksResult),
            Self::RegisterRequest => Some(Self::RegisterResult),
            Self::UnregisterRequest => Some(Self::UnregisterFinished),
            _ => None,
        }
    }
}

impl fmt::Display for MessageType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
