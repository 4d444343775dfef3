//! NBD requests and their replies, after the handshake (`specs/replica.md §6`).

use super::limits::SPEC;
use super::limits::TRANSFER_BYTES;
use crate::error::WireError;
use crate::reader::{Reader, Stop, decode};

const MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// The operation that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandKind {
    /// Reads from the disk. The data follow the reply.
    Read,
    /// Writes to the disk. The data follow the request.
    Write,
    /// Ends the connection, without a reply.
    Disconnect,
    /// Asks the server to make earlier writes durable.
    Flush,
    /// Declares that the client no longer needs these bytes.
    Trim,
    /// Writes zeros without sending data.
    WriteZeroes,
}

/// One request. Its range lies inside the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The operation that the client requests.
    pub kind: CommandKind,
    /// Identifies the request. The reply repeats it.
    pub cookie: [u8; 8],
    /// Offset of the first byte on the disk.
    pub offset: u64,
    /// Number of bytes that the request covers.
    pub length: u32,
}

impl Request {
    /// Length on the wire without a WRITE's data, in bytes.
    pub const BYTES: usize = 28;

    /// Reads one request for a disk of `len_bytes`; `None` while bytes are missing.
    ///
    /// # Errors
    /// [`WireError`] for another message, more than [`TRANSFER_BYTES`] bytes, or a range outside of the disk.
    pub fn decode(bytes: &[u8], len_bytes: u64) -> Result<Option<(Self, usize)>, WireError> {
        decode(bytes, "NBD request", |r| Self::read(r, len_bytes))
    }

    fn read(r: &mut Reader<'_>, len_bytes: u64) -> Result<Self, Stop> {
        if r.u32()? != MAGIC {
            return Err(r.bad(SPEC, format!("the magic is not {MAGIC:#x}")));
        }
        let flags = r.u16()?;
        let code = r.u16()?;
        // FUA (bit 0) is allowed with every command. NO_HOLE (bit 1) and FAST_ZERO belong to WRITE_ZEROES only.
        // The server did not offer FAST_ZERO.
        let (kind, known) = match code {
            0 => (CommandKind::Read, 1),
            1 => (CommandKind::Write, 1),
            2 => (CommandKind::Disconnect, 1),
            3 => (CommandKind::Flush, 1),
            4 => (CommandKind::Trim, 1),
            6 => (CommandKind::WriteZeroes, 1 | 1 << 1),
            other => return Err(r.bad(SPEC, format!("command {other} was not offered"))),
        };
        if flags & !known != 0 {
            return Err(r.bad(SPEC, format!("flags {flags:#x} were not offered for command {code}")));
        }
        let cookie = r.array()?;
        let offset = r.u64()?;
        let length = r.u32()?;
        match kind {
            CommandKind::Disconnect => {}
            CommandKind::Flush if offset != 0 || length != 0 => {
                return Err(r.bad(SPEC, "FLUSH applies to the whole disk: offset and length must be 0"));
            }
            CommandKind::Read | CommandKind::Write if length > TRANSFER_BYTES => {
                return Err(r.bad(SPEC, format!("{length} bytes, at most {TRANSFER_BYTES}")));
            }
            _ if offset.checked_add(length.into()).is_none_or(|end| end > len_bytes) => {
                let rule = format!("{length} bytes at {offset} are outside of a disk of {len_bytes} bytes");
                return Err(r.bad(SPEC, rule));
            }
            _ => {}
        }
        Ok(Self { kind, cookie, offset, length })
    }

    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let code: u16 = match self.kind {
            CommandKind::Read => 0,
            CommandKind::Write => 1,
            CommandKind::Disconnect => 2,
            CommandKind::Flush => 3,
            CommandKind::Trim => 4,
            CommandKind::WriteZeroes => 6,
        };
        out.extend_from_slice(&MAGIC.to_be_bytes());
        out.extend_from_slice(&[0, 0]);
        out.extend_from_slice(&code.to_be_bytes());
        out.extend_from_slice(&self.cookie);
        out.extend_from_slice(&self.offset.to_be_bytes());
        out.extend_from_slice(&self.length.to_be_bytes());
    }
}

/// Appends a simple reply. `error` is 0 or an errno value of NBD.
pub fn reply(cookie: [u8; 8], error: u32, out: &mut Vec<u8>) {
    out.extend_from_slice(&REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&error.to_be_bytes());
    out.extend_from_slice(&cookie);
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: u64 = 1 << 20;

    fn request(kind: CommandKind, offset: u64, length: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        Request { kind, cookie: *b"01234567", offset, length }.encode(&mut bytes);
        bytes
    }

    #[test]
    fn requests_are_read_as_they_were_written() {
        use CommandKind::*;
        for (kind, offset, length) in
            [(Read, 0, 512), (Write, DISK - 1, 1), (Flush, 0, 0), (Trim, 7, 9), (WriteZeroes, 0, DISK as u32)]
        {
            let bytes = request(kind, offset, length);
            let (read, used) = Request::decode(&bytes, DISK).unwrap().unwrap();
            assert_eq!((read.kind, read.offset, read.length, used), (kind, offset, length, Request::BYTES));
            assert_eq!(Request::decode(&bytes[..27], DISK), Ok(None));
        }
        let mut said = Vec::new();
        reply(*b"01234567", 5, &mut said);
        assert_eq!(said, b"\x67\x44\x66\x98\0\0\0\x0501234567");
    }

    #[test]
    fn requests_outside_of_the_disk_or_the_limits_are_refused() {
        use CommandKind::*;
        let refused = |bytes: &[u8], word: &str| {
            let why = Request::decode(bytes, DISK).unwrap_err().to_string();
            assert!(why.contains(word) && why.contains("specs/replica.md §6"), "{why}");
        };
        refused(&request(Write, DISK, 1), "outside");
        refused(&request(Read, u64::MAX, 2), "outside");
        refused(&request(WriteZeroes, 1 << 63, 1), "outside");
        refused(&request(Write, 0, TRANSFER_BYTES + 1), "at most");
        refused(&request(Flush, 0, 1), "FLUSH");
        let mut other = request(Read, 0, 1);
        other[7] = 5;
        refused(&other, "command 5");
        other[7] = 0;
        other[5] = 4;
        refused(&other, "flags");
        other[0] = 0;
        refused(&other, "magic");
    }
}
