//! The header of 16 bytes that precedes every message (specs/vfio-user.md §2).

use super::error::WireError;

/// Length of a header in bytes.
pub const HEADER_BYTES: usize = 16;

const TYPE_MASK: u32 = 0xf;
const TYPE_COMMAND: u32 = 0;
const TYPE_REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// A request's command, with the protocol's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Command {
    /// Exchanges version and capabilities; the first message.
    Version = 1,
    /// Maps guest RAM that the device may use.
    DmaMap = 2,
    /// Withdraws guest RAM from the device.
    DmaUnmap = 3,
    /// Queries the device's description.
    DeviceGetInfo = 4,
    /// Queries the description of a region.
    DeviceGetRegionInfo = 5,
    /// Queries the description of an interrupt type.
    DeviceGetIrqInfo = 7,
    /// Connects interrupts to eventfds.
    DeviceSetIrqs = 8,
    /// Reads bytes of a region.
    RegionRead = 9,
    /// Writes bytes of a region.
    RegionWrite = 10,
    /// Server to client: reads guest RAM that is not mapped.
    DmaRead = 11,
    /// Server to client: writes guest RAM that is not mapped.
    DmaWrite = 12,
    /// Resets the device to its first state.
    DeviceReset = 13,
    /// Reads, sets or probes a feature.
    DeviceFeature = 16,
    /// Reads migration data in a save session.
    MigDataRead = 17,
    /// Writes migration data in RESUMING.
    MigDataWrite = 18,
}

impl Command {
    /// All commands that this version knows.
    pub const ALL: [Command; 15] = [
        Command::Version,
        Command::DmaMap,
        Command::DmaUnmap,
        Command::DeviceGetInfo,
        Command::DeviceGetRegionInfo,
        Command::DeviceGetIrqInfo,
        Command::DeviceSetIrqs,
        Command::RegionRead,
        Command::RegionWrite,
        Command::DmaRead,
        Command::DmaWrite,
        Command::DeviceReset,
        Command::DeviceFeature,
        Command::MigDataRead,
        Command::MigDataWrite,
    ];

    /// Converts a number. `None` if the command is unknown.
    pub fn from_number(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|command| *command as u16 == number)
    }

    /// The command's number in the protocol.
    pub fn number(self) -> u16 {
        self as u16
    }

    /// The command's name in the protocol, without its prefix.
    pub fn name(self) -> &'static str {
        match self {
            Command::Version => "VERSION",
            Command::DmaMap => "DMA_MAP",
            Command::DmaUnmap => "DMA_UNMAP",
            Command::DeviceGetInfo => "DEVICE_GET_INFO",
            Command::DeviceGetRegionInfo => "DEVICE_GET_REGION_INFO",
            Command::DeviceGetIrqInfo => "DEVICE_GET_IRQ_INFO",
            Command::DeviceSetIrqs => "DEVICE_SET_IRQS",
            Command::RegionRead => "REGION_READ",
            Command::RegionWrite => "REGION_WRITE",
            Command::DmaRead => "DMA_READ",
            Command::DmaWrite => "DMA_WRITE",
            Command::DeviceReset => "DEVICE_RESET",
            Command::DeviceFeature => "DEVICE_FEATURE",
            Command::MigDataRead => "MIG_DATA_READ",
            Command::MigDataWrite => "MIG_DATA_WRITE",
        }
    }
}

/// Whether a message is a request or a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The message is a request.
    Command {
        /// The sender wants no reply.
        no_reply: bool,
    },
    /// The message is a successful reply.
    Reply,
    /// The message is a reply that reports failure, with an errno that may be 0. It has no payload.
    ErrorReply(u32),
}

/// The decoded header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Id chosen by the request's sender. A reply repeats it.
    pub id: u16,
    /// Number of the command, which may be unknown.
    pub command: u16,
    /// Length of the message in bytes, including the header.
    pub size: u32,
    /// Whether the message is a request or a reply.
    pub kind: Kind,
}

impl Header {
    /// The command. `None` if its number is unknown.
    pub fn command(&self) -> Option<Command> {
        Command::from_number(self.command)
    }

    /// Number of bytes after the header.
    pub fn payload_bytes(&self) -> usize {
        (self.size as usize).saturating_sub(HEADER_BYTES)
    }

    /// Encodes the header as 16 bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let (flags, error) = match self.kind {
            Kind::Command { no_reply: false } => (TYPE_COMMAND, 0),
            Kind::Command { no_reply: true } => (TYPE_COMMAND | NO_REPLY, 0),
            Kind::Reply => (TYPE_REPLY, 0),
            Kind::ErrorReply(errno) => (TYPE_REPLY | ERROR, errno),
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..2].copy_from_slice(&self.id.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.command.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.size.to_le_bytes());
        bytes[8..12].copy_from_slice(&u32::to_le_bytes(flags));
        bytes[12..16].copy_from_slice(&error.to_le_bytes());
        bytes
    }

    /// Decodes a header. `limit` is the highest permitted length of a message in bytes.
    ///
    /// # Errors
    /// An invalid size, or flags that the protocol does not define. The position of the next message is then
    /// unknown: close the connection.
    pub fn decode(bytes: &[u8; HEADER_BYTES], limit: u32) -> Result<Self, WireError> {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let (id, command) =
            (u16::from_le_bytes([bytes[0], bytes[1]]), u16::from_le_bytes([bytes[2], bytes[3]]));
        let message = Command::from_number(command).map_or("message of an unknown command", Command::name);
        let (size, flags, errno) = (u32_at(4), u32_at(8), u32_at(12));
        let bad = |at, field, value: u32, rule| {
            Err(WireError::Value { message, at, field, value: value.into(), rule })
        };
        if flags & !(TYPE_MASK | NO_REPLY | ERROR) != 0 {
            return bad(8, "flags", flags, "it has unknown bits");
        }
        let kind = match (flags & TYPE_MASK, flags & NO_REPLY != 0, flags & ERROR != 0) {
            (TYPE_COMMAND, no_reply, false) => Kind::Command { no_reply },
            (TYPE_COMMAND, _, true) => return bad(8, "flags", flags, "a command reports no error"),
            (TYPE_REPLY, false, false) => Kind::Reply,
            (TYPE_REPLY, false, true) => Kind::ErrorReply(errno),
            (TYPE_REPLY, true, _) => return bad(8, "flags", flags, "a reply cannot request an answer"),
            _ => return bad(8, "flags", flags, "it is neither a command nor a reply"),
        };
        if errno != 0 && !matches!(kind, Kind::ErrorReply(_)) {
            return bad(12, "error", errno, "only a reply that reports an error has one");
        }
        let most = if matches!(kind, Kind::ErrorReply(_)) { HEADER_BYTES as u32 } else { limit };
        if size < HEADER_BYTES as u32 || size > most {
            return Err(WireError::Size { message, size, least: HEADER_BYTES as u32, most });
        }
        Ok(Self { id, command, size, kind })
    }
}
