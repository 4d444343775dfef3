//! The bytes of requests, responses and page requests (specs/ch-offload.md §2). Pure.

use super::rules::{CONFIG_MOST, STATE_MOST, VERSION};

/// Bytes of a request's or a response's header.
pub const HEADER_BYTES: usize = 16;
/// Bytes of a page request's payload.
pub const PAGE_REQUEST_BYTES: usize = 16;
/// Bytes of a memory descriptor's payload: the number of its slot.
pub const SLOT_BYTES: usize = 4;
/// Status of a response: the request was performed.
const OK: u16 = 1;
/// Status of a response: the request failed.
const ERROR: u16 = 2;
/// The first bytes of a connection on which the VMM requests pages.
pub const FAULT_ROLE: [u8; 2] = 2u16.to_le_bytes();

/// The command of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Begins a migration; the header contains the version.
    Start,
    /// The machine's configuration and the layout of its memory.
    Config,
    /// The state of processors and devices.
    State,
    /// Memory in the stream. It is not part of a local migration.
    Memory,
    /// The end of the migration of a running guest.
    Complete,
    /// The sender gives up.
    Abandon,
    /// A memory slot; its memory comes as a descriptor.
    MemoryFd,
    /// The end of the migration of a paused guest.
    CompletePaused,
    /// The VMM needs pages.
    PageFault,
}

impl Command {
    const ALL: [(u16, Self, &'static str); 9] = [
        (1, Self::Start, "Start"),
        (2, Self::Config, "Config"),
        (3, Self::State, "State"),
        (4, Self::Memory, "Memory"),
        (5, Self::Complete, "Complete"),
        (6, Self::Abandon, "Abandon"),
        (7, Self::MemoryFd, "MemoryFd"),
        (8, Self::CompletePaused, "CompletePaused"),
        (9, Self::PageFault, "PageFault"),
    ];

    /// The name in specs/ch-offload.md.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, command, _)| *command == self).map_or("", |(.., name)| name)
    }

    fn number(self) -> u16 {
        Self::ALL.iter().find(|(_, command, _)| *command == self).map_or(0, |(number, ..)| *number)
    }
}

/// The header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// What is requested.
    pub command: Command,
    /// Version of the protocol in a [`Command::Start`]; 0 in all others.
    pub version: u16,
    /// Bytes of the payload that follows.
    pub payload_bytes: u64,
}

/// The header of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Response {
    /// Whether the request was performed.
    pub is_ok: bool,
    /// Bytes of the payload that follows.
    pub payload_bytes: u64,
}

/// A range of guest-physical addresses that the VMM needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRequest {
    /// The first address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A message breaks a rule of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The number of the command is unknown.
    #[error(
        "it sent the unknown command {number}; connect only Cloud Hypervisor's local migration here (specs/ch-offload.md §2)"
    )]
    Command {
        /// The number.
        number: u16,
    },
    /// The version is unknown.
    #[error(
        "it speaks version {version} of the migration protocol, but only {VERSION} is known: use a Cloud Hypervisor of \
         release 54, or a newer Sterna"
    )]
    Version {
        /// The version in the message.
        version: u16,
    },
    /// The payload has a length that the command does not have.
    #[error("its {} has a payload of {bytes} bytes, but {rule} (specs/ch-offload.md §2)", .command.name())]
    Length {
        /// The command.
        command: Command,
        /// Bytes of the payload.
        bytes: u64,
        /// The broken rule, as a clause.
        rule: &'static str,
    },
    /// The status of a response is unknown.
    #[error("it sent a response with the unknown status {status} (specs/ch-offload.md §2)")]
    Status {
        /// The status.
        status: u16,
    },
    /// A page request has an address or a length that is no whole page.
    #[error(
        "it requested {bytes} bytes at the guest address {address:#x}, which are no whole pages of 4096 bytes \
         (specs/ch-offload.md §5)"
    )]
    Page {
        /// The first address.
        address: u64,
        /// Length in bytes.
        bytes: u64,
    },
}

impl Request {
    /// A request with a payload.
    pub fn new(command: Command, payload_bytes: u64) -> Self {
        Self { command, version: VERSION, payload_bytes }
    }

    /// Decodes a header, and checks the length of the payload.
    ///
    /// # Errors
    /// [`MessageError`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, MessageError> {
        let number = u16::from_le_bytes([bytes[0], bytes[1]]);
        let known = Command::ALL.iter().find(|(known, ..)| *known == number);
        let Some((_, command, _)) = known.copied() else { return Err(MessageError::Command { number }) };
        let version =
            if command == Command::Start { u16::from_le_bytes([bytes[2], bytes[3]]) } else { VERSION };
        if version != VERSION {
            return Err(MessageError::Version { version });
        }
        let request = Self { command, version, payload_bytes: length(bytes) };
        request.check_length().map(|()| request)
    }

    /// The bytes of the header.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..2].copy_from_slice(&self.command.number().to_le_bytes());
        bytes[2..4].copy_from_slice(&self.version.to_le_bytes());
        bytes[8..].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes
    }

    fn check_length(&self) -> Result<(), MessageError> {
        let bytes = self.payload_bytes;
        let (is_right, rule) = match self.command {
            Command::Config => ((1..=CONFIG_MOST).contains(&bytes), "1 byte to 16 MiB are possible"),
            Command::State => ((1..=STATE_MOST).contains(&bytes), "1 byte to 256 MiB are possible"),
            Command::MemoryFd => (bytes == SLOT_BYTES as u64, "4 bytes are needed"),
            Command::PageFault => (bytes == PAGE_REQUEST_BYTES as u64, "16 bytes are needed"),
            // Its payload is never read.
            Command::Memory => (true, ""),
            Command::Start | Command::Complete | Command::CompletePaused | Command::Abandon => {
                (bytes == 0, "it has none")
            }
        };
        if is_right {
            return Ok(());
        }
        Err(MessageError::Length { command: self.command, bytes, rule })
    }
}

impl Response {
    /// The request was performed; there is no payload.
    pub const DONE: Self = Self { is_ok: true, payload_bytes: 0 };
    /// The request failed.
    pub const FAILED: Self = Self { is_ok: false, payload_bytes: 0 };

    /// Decodes a header.
    ///
    /// # Errors
    /// [`MessageError::Status`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, MessageError> {
        let is_ok = match u16::from_le_bytes([bytes[0], bytes[1]]) {
            OK => true,
            ERROR => false,
            status => return Err(MessageError::Status { status }),
        };
        Ok(Self { is_ok, payload_bytes: length(bytes) })
    }

    /// The bytes of the header.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..2].copy_from_slice(&(if self.is_ok { OK } else { ERROR }).to_le_bytes());
        bytes[8..].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes
    }
}

impl PageRequest {
    /// Decodes the payload of a [`Command::PageFault`].
    ///
    /// # Errors
    /// [`MessageError::Page`].
    pub fn decode(payload: &[u8; PAGE_REQUEST_BYTES]) -> Result<Self, MessageError> {
        let number =
            |at: usize| payload[at..at + 8].iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte));
        let (address, bytes) = (number(0), number(8));
        let is_whole = address.is_multiple_of(4096) && bytes.is_multiple_of(4096) && bytes > 0;
        if !is_whole || address.checked_add(bytes).is_none() {
            return Err(MessageError::Page { address, bytes });
        }
        Ok(Self { address, bytes })
    }

    /// The bytes of the payload.
    pub fn encode(&self) -> [u8; PAGE_REQUEST_BYTES] {
        let mut bytes = [0; PAGE_REQUEST_BYTES];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }
}

fn length(bytes: &[u8; HEADER_BYTES]) -> u64 {
    bytes[8..].iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_the_bytes_that_cloud_hypervisor_sends() {
        let start = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(Request::decode(&start), Ok(Request::new(Command::Start, 0)));
        let config = [2, 0, 0, 0, 0, 0, 0, 0, 0x58, 0x18, 0, 0, 0, 0, 0, 0];
        assert_eq!(Request::decode(&config), Ok(Request::new(Command::Config, 6232)));
        assert_eq!(Request::new(Command::Config, 6232).encode(), config);
        assert_eq!(Response::DONE.encode(), start);
        assert_eq!(Response::decode(&start), Ok(Response::DONE));
        assert_eq!(Response::FAILED.encode()[0], 2);
        assert_eq!(FAULT_ROLE, [2, 0]);
    }

    #[test]
    fn every_command_comes_back() {
        for (_, command, name) in Command::ALL {
            let bytes = match command {
                Command::MemoryFd => 4,
                Command::PageFault => 16,
                Command::Config | Command::State | Command::Memory => 9,
                _ => 0,
            };
            let request = Request::new(command, bytes);
            assert_eq!(Request::decode(&request.encode()), Ok(request), "{name}");
            assert_eq!(command.name(), name);
        }
    }

    #[test]
    fn header_that_breaks_a_rule_is_refused_with_the_rule() {
        let refused = |command: u16, version: u16, bytes: u64| {
            let mut header = [0; HEADER_BYTES];
            header[..2].copy_from_slice(&command.to_le_bytes());
            header[2..4].copy_from_slice(&version.to_le_bytes());
            header[8..].copy_from_slice(&bytes.to_le_bytes());
            Request::decode(&header).unwrap_err()
        };

        assert_eq!(refused(0, 0, 0), MessageError::Command { number: 0 });
        assert_eq!(refused(10, 0, 0), MessageError::Command { number: 10 });
        assert_eq!(refused(1, 2, 0), MessageError::Version { version: 2 });
        for (command, bytes) in [(1, 1), (2, 0), (2, CONFIG_MOST + 1), (3, u64::MAX), (5, 4), (7, 8), (9, 15)]
        {
            let error = refused(command, 0, bytes);
            assert!(matches!(error, MessageError::Length { bytes: found, .. } if found == bytes), "{error}");
        }
    }

    #[test]
    fn page_requests_are_whole_pages() {
        let request = PageRequest { address: 0x1_0000_3000, bytes: 4096 };
        assert_eq!(PageRequest::decode(&request.encode()), Ok(request));
        for (address, bytes) in [(1, 4096), (4096, 0), (0, 100), (!0xfff, 8192), (0, !0)] {
            let wrong = PageRequest { address, bytes };
            assert_eq!(
                PageRequest::decode(&wrong.encode()),
                Err(MessageError::Page { address, bytes }),
                "{wrong:?}"
            );
        }
    }
}
