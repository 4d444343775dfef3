//! The introduction that a Sterna adds to private data (`specs/rdma.md §2.3`).

use super::chunk::ChunkSize;
use crate::error::WireError;
use crate::reader::{Reader, Stop};
use std::fmt;

const MESSAGE: &str = "RDMA introduction";
const SPEC: &str = "specs/rdma.md §2.3";
const MAGIC: u32 = 0x5354_4e52;
const MAIN: u16 = 1;
const RETURN_PATH: u16 = 2;
const LANE: u16 = 3;
const QUESTION: u16 = 4;

/// Bytes 8 to 55 of private data: the purpose of a Sterna's connection.
///
/// The introduction proves nothing. As with every other transport, the sides authenticate later
/// (`specs/extension.md §2`, `§6`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Introduction {
    /// In a request the source's highest version, in a reply the selected one.
    pub version: u16,
    /// The purpose of the connection.
    pub part: Part,
    /// In a request the number of lanes that the source wants. A reply states at most that number.
    ///
    /// 0 means no lanes.
    pub lanes: u8,
    /// The chunk size of the sender.
    pub chunk: ChunkSize,
    /// The migration's id (`specs/extension.md §2`), the same for all its connections.
    ///
    /// It is a name, not a secret.
    pub session: [u8; 16],
    /// Drawn at random by the source for each connection. The reply repeats it.
    pub nonce: [u8; 16],
}

/// The purpose of an RDMA connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// The main connection, which carries the stream.
    Main,
    /// The return path, from the destination to the source.
    ReturnPath,
    /// The lane with this number, from 0.
    Lane(u8),
    /// The status question after a lost acknowledgement.
    Question,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Main => f.write_str("the main connection"),
            Self::ReturnPath => f.write_str("the return path"),
            Self::Lane(number) => write!(f, "lane {number}"),
            Self::Question => f.write_str("a status question"),
        }
    }
}

impl Introduction {
    /// Length on the wire, in bytes.
    pub const BYTES: usize = 48;
    /// The version of this code.
    ///
    /// From version 2 on, a reply states the destination's limit on registered memory.
    pub const VERSION: u16 = 2;
    /// The first version whose replies state a limit on registered memory.
    pub(super) const WITH_LIMIT: u16 = 2;

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let (part, lane) = match self.part {
            Part::Main => (MAIN, 0),
            Part::ReturnPath => (RETURN_PATH, 0),
            Part::Lane(number) => (LANE, number),
            Part::Question => (QUESTION, 0),
        };
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&self.version.to_be_bytes());
        out.extend_from_slice(&part.to_be_bytes());
        // The cast is lossless, because a chunk size is at most 1 GiB.
        out.extend_from_slice(&(self.chunk.bytes() as u32).to_be_bytes());
        out.extend_from_slice(&[0, lane, 0, self.lanes]);
        out.extend_from_slice(&self.session);
        out.extend_from_slice(&self.nonce);
    }

    /// The answer of a destination with this chunk size and at most `lanes` lanes.
    pub(super) fn answered(self, lanes: u8, chunk: ChunkSize) -> Result<Self, WireError> {
        let lanes = self.lanes.min(lanes);
        match self.part {
            Part::Lane(number) if number >= lanes => {
                let rule = format!("{}, but this side accepts {lanes}", self.part);
                Err(WireError::incompatible(MESSAGE, 12, SPEC, rule))
            }
            _ => Ok(Self { version: self.version.min(Self::VERSION), lanes, chunk, ..self }),
        }
    }

    /// Reads the introduction of a request. `None` without the magic: the source is a QEMU.
    pub(super) fn in_request(bytes: &[u8]) -> Result<Option<Self>, WireError> {
        let Some(bytes) = with_magic(bytes) else { return Ok(None) };
        let mut r = Reader::new(bytes, MESSAGE);
        whole(read(&mut r)).map(Some)
    }

    /// Reads the introduction of a reply to `asked`. `None` without the magic or the nonce.
    ///
    /// The reply of a QEMU has arbitrary bytes here.
    pub(super) fn in_reply(bytes: &[u8], asked: &Self) -> Result<Option<Self>, WireError> {
        let Some(bytes) = with_magic(bytes).filter(|bytes| bytes.ends_with(&asked.nonce)) else {
            return Ok(None);
        };
        let mut r = Reader::new(bytes, MESSAGE);
        let reply = whole(read(&mut r))?;
        let contradicts = |at, rule| Err(WireError::misbehaved(MESSAGE, at, SPEC, rule));
        if reply.version > asked.version {
            return contradicts(4, format!("version {} after {}", reply.version, asked.version));
        }
        if reply.part != asked.part {
            return contradicts(6, format!("{} was requested, but {} was answered", asked.part, reply.part));
        }
        if reply.lanes > asked.lanes {
            return contradicts(14, format!("{} lanes, but {} were requested", reply.lanes, asked.lanes));
        }
        if reply.session != asked.session {
            return contradicts(16, "the answer names another session".to_owned());
        }
        Ok(Some(reply))
    }
}

/// The bytes of an introduction; `None` without the magic.
fn with_magic(bytes: &[u8]) -> Option<&[u8; Introduction::BYTES]> {
    bytes.first_chunk().filter(|bytes| bytes.starts_with(&MAGIC.to_be_bytes()))
}

fn read(r: &mut Reader<'_>) -> Result<Introduction, Stop> {
    r.u32()?;
    // Later versions keep these fields at the same offsets.
    let version = r.u16()?;
    if version == 0 {
        return Err(r.bad(SPEC, "version 0, but the first version is 1"));
    }
    let kind = r.u16()?;
    if !(MAIN..=QUESTION).contains(&kind) {
        return Err(r.bad(SPEC, format!("part {kind} is not 1 to 4")));
    }
    let bytes = u64::from(r.u32()?);
    let Some(chunk) = ChunkSize::exact(bytes) else {
        return Err(
            r.bad(SPEC, format!("a chunk of {bytes} bytes is not a power of two from 1 MiB to 1 GiB"))
        );
    };
    let lane = r.u16()?;
    let part = match (kind, u8::try_from(lane)) {
        (MAIN, Ok(0)) => Part::Main,
        (RETURN_PATH, Ok(0)) => Part::ReturnPath,
        (QUESTION, Ok(0)) => Part::Question,
        (LANE, Ok(number)) => Part::Lane(number),
        _ => return Err(r.bad(SPEC, format!("lane {lane} in a connection of part {kind}"))),
    };
    let Ok(lanes) = u8::try_from(r.u16()?) else {
        return Err(r.bad(SPEC, "more than 255 lanes"));
    };
    if matches!(part, Part::Lane(number) if number >= lanes) {
        return Err(r.bad(SPEC, format!("{part}, but there are {lanes}")));
    }
    let (session, nonce) = (r.array()?, r.array()?);
    if session == [0; 16] || nonce == [0; 16] {
        return Err(r.bad(SPEC, "session or nonce is all zero"));
    }
    Ok(Introduction { version, part, lanes, chunk, session, nonce })
}

/// Turns missing bytes into an error, because private data arrive complete.
fn whole<T>(read: Result<T, Stop>) -> Result<T, WireError> {
    read.map_err(|stop| match stop {
        Stop::Bad(error) => error,
        Stop::Short(bytes) => {
            WireError::misbehaved(MESSAGE, 0, SPEC, format!("it must have {bytes} bytes, but fewer arrived"))
        }
    })
}
