//! Private data of the RDMA connection manager (`specs/rdma.md §2`).
//!
//! Both sides agree with it on registration, before a queue pair exists.

use super::chunk::ChunkSize;
use super::introduction::{Introduction, Part};
use super::records::be32;
use crate::error::WireError;

const REQUEST: &str = "RDMA connect request";
const REPLY: &str = "RDMA connect reply";
const SPEC: &str = "specs/rdma.md §2.1";
const VERSION: u32 = 1;
const PIN_ALL: u32 = 1;
/// Length of version and flags, in bytes.
const PLAIN_BYTES: usize = 8;

/// Private data with which a source opens a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectRequest {
    /// Whether the source wants all memory registered at the start.
    pub pin_all: bool,
    /// The addition of a Sterna; `None` from a QEMU.
    pub introduction: Option<Introduction>,
}

/// Private data with which a destination accepts a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectReply {
    /// Whether the destination registers all memory at the start.
    pub pin_all: bool,
    /// The addition of a Sterna, if the source sent an introduction.
    pub introduction: Option<Introduction>,
    /// Limit of the destination on registered guest memory, in bytes; `None` without a limit.
    ///
    /// At least 1 MiB. Only a Sterna of version 2 states it.
    pub pinned_limit: Option<u64>,
}

/// The time at which memory is registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Registration {
    /// In parts, each before its first WRITE.
    Dynamic,
    /// All memory, when the sides exchange their blocks.
    PinAll,
}

impl ConnectRequest {
    /// Most bytes on the wire. The connection manager accepts no more in a request.
    pub const MAX_BYTES: usize = PLAIN_BYTES + Introduction::BYTES;

    /// The private data of the request: 8 bytes, or 56 with an introduction.
    pub fn to_bytes(self) -> Vec<u8> {
        encode(self.pin_all, self.introduction)
    }

    /// Reads the private data of a connect request.
    ///
    /// The connection manager pads it, so that bytes after the sent ones are arbitrary.
    ///
    /// # Errors
    /// Fewer than eight bytes; a version other than 1; an introduction that breaks its format. Then reject the
    /// connection.
    pub fn decode(received: &[u8]) -> Result<Self, WireError> {
        let (version, flags, rest) = plain(received, REQUEST)?;
        if version != VERSION {
            let rule = format!("version {version}, only {VERSION} is known");
            return Err(WireError::incompatible(REQUEST, 0, SPEC, rule));
        }
        // Unknown flags are not repeated in the reply, so that the sender notices.
        let introduction = Introduction::in_request(rest).map_err(|error| error.at(PLAIN_BYTES as u64))?;
        Ok(Self { pin_all: flags & PIN_ALL != 0, introduction })
    }

    /// The reply of a destination with this chunk size and at most `lanes` lanes.
    ///
    /// # Errors
    /// The connection is a lane that this side does not accept. Then reject the connection.
    pub fn reply(&self, lanes: u8, chunk: ChunkSize) -> Result<ConnectReply, WireError> {
        let introduction = self.introduction.map(|asked| asked.answered(lanes, chunk)).transpose();
        let introduction = introduction.map_err(|error| error.at(PLAIN_BYTES as u64))?;
        Ok(ConnectReply { pin_all: self.pin_all, introduction, pinned_limit: None })
    }

    /// The registration that `reply` selects.
    ///
    /// # Errors
    /// The reply selects pin-all, and the request did not offer it.
    pub fn agreed(&self, reply: &ConnectReply) -> Result<Registration, WireError> {
        match (self.pin_all, reply.pin_all) {
            (true, true) => Ok(Registration::PinAll),
            (_, false) => Ok(Registration::Dynamic),
            (false, true) => {
                let rule = "it has the flag pin-all, which the request did not have";
                Err(WireError::misbehaved(REPLY, 4, "specs/rdma.md §2.2", rule))
            }
        }
    }
}

impl ConnectReply {
    /// The same reply with a limit, if the selected version has a field for it.
    #[must_use]
    pub fn with_pinned_limit(self, limit: Option<u64>) -> Self {
        let limit = limit.filter(|_| states_limit(self.introduction));
        Self { pinned_limit: limit.map(|limit| limit.max(ChunkSize::LEAST.bytes())), ..self }
    }

    /// The private data of the reply, in bytes: 8 without an introduction.
    ///
    /// With an introduction of version 1 it has 56 bytes, with a later version 64.
    pub fn to_bytes(self) -> Vec<u8> {
        let mut out = encode(self.pin_all, self.introduction);
        if states_limit(self.introduction) {
            out.extend_from_slice(&self.pinned_limit.unwrap_or(0).to_be_bytes());
        }
        out
    }

    /// Reads the private data of the reply to `request`.
    ///
    /// The reply's version is ignored. An introduction counts only if it repeats the request's nonce.
    ///
    /// # Errors
    /// Fewer than eight bytes; an introduction with the right nonce that breaks its format or contradicts the
    /// request.
    pub fn decode(received: &[u8], request: &ConnectRequest) -> Result<Self, WireError> {
        let (_, flags, rest) = plain(received, REPLY)?;
        let introduction = match &request.introduction {
            Some(asked) => {
                Introduction::in_reply(rest, asked).map_err(|error| error.at(PLAIN_BYTES as u64))?
            }
            None => None,
        };
        let pinned_limit = if states_limit(introduction) { limit(rest)? } else { None };
        Ok(Self { pin_all: flags & PIN_ALL != 0, introduction, pinned_limit })
    }

    /// Whether the peer is a QEMU, as far as this connection shows.
    ///
    /// For a part that only a Sterna has (a lane, a question), a QEMU is an error.
    ///
    /// # Errors
    /// A QEMU answered, and the request asked for such a part.
    pub fn is_plain(&self, request: &ConnectRequest) -> Result<bool, WireError> {
        match (&self.introduction, request.introduction.map(|asked| asked.part)) {
            (None, Some(part @ (Part::Lane(_) | Part::Question))) => {
                let rule = format!("the peer is not a Sterna, but only a Sterna understands {part}");
                Err(WireError::incompatible(REPLY, PLAIN_BYTES as u64, "specs/rdma.md §2.3", rule))
            }
            (introduction, _) => Ok(introduction.is_none()),
        }
    }
}

/// Whether a reply with this introduction has a field for the limit.
fn states_limit(introduction: Option<Introduction>) -> bool {
    introduction.is_some_and(|own| own.version >= Introduction::WITH_LIMIT)
}

/// Reads the limit after an introduction; 0 means no limit.
fn limit(rest: &[u8]) -> Result<Option<u64>, WireError> {
    let at = (PLAIN_BYTES + Introduction::BYTES) as u64;
    let bad = |rule| Err(WireError::misbehaved(REPLY, at, "specs/rdma.md §2.3", rule));
    let Some(bytes) = rest.get(Introduction::BYTES..).and_then(<[u8]>::first_chunk) else {
        return bad("version 2 has a limit on registered memory, but its bytes are missing".to_owned());
    };
    match u64::from_be_bytes(*bytes) {
        0 => Ok(None),
        limit if limit < ChunkSize::LEAST.bytes() => {
            bad(format!("{limit} bytes may be registered, but a window needs at least 1 MiB"))
        }
        limit => Ok(Some(limit)),
    }
}

fn encode(pin_all: bool, introduction: Option<Introduction>) -> Vec<u8> {
    let flags = if pin_all { PIN_ALL } else { 0 };
    let mut out = [VERSION, flags].map(u32::to_be_bytes).concat();
    if let Some(introduction) = introduction {
        introduction.encode(&mut out);
    }
    out
}

/// Splits private data into version, flags and the remaining bytes.
fn plain<'a>(received: &'a [u8], message: &'static str) -> Result<(u32, u32, &'a [u8]), WireError> {
    match received.split_first_chunk::<PLAIN_BYTES>() {
        Some((head, rest)) => Ok((be32(head, 0), be32(head, 4), rest)),
        None => {
            let rule = format!("{} bytes, but version and flags have {PLAIN_BYTES}", received.len());
            Err(WireError::misbehaved(message, received.len() as u64, SPEC, rule))
        }
    }
}
