//! Requests and their replies.

use super::{SPEC, TRANSFER_BYTES};
use crate::error::WireError;
use crate::reader::{Reader, Stop, decode};

const MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

/// What a request wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandKind {
    /// Bytes of the disk; they follow the reply.
    Read,
    /// Bytes for the disk; they follow the request.
    Write,
    /// The end of the connection. There is no reply.
    Disconnect,
    /// What was written is to be kept.
    Flush,
    /// These bytes mean nothing any more.
    Trim,
    /// These bytes are zero.
    WriteZeroes,
}

/// One request, which lies inside the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// What it wants.
    pub kind: CommandKind,
    /// By which the client knows the reply.
    pub cookie: [u8; 8],
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u32,
}

impl Request {
    /// Bytes on the wire, without a WRITE's data.
    pub const BYTES: usize = 28;

    /// Reads a request for a disk of `len_bytes`; `None` until all of it is there.
    ///
    /// # Errors
    /// [`WireError`]: it is none, moves more than [`TRANSFER_BYTES`], or lies outside of the disk.
    pub fn decode(bytes: &[u8], len_bytes: u64) -> Result<Option<(Self, usize)>, WireError> {
        decode(bytes, "NBD request", |r| Self::read(r, len_bytes))
    }

    fn read(r: &mut Reader<'_>, len_bytes: u64) -> Result<Self, Stop> {
        if r.u32()? != MAGIC {
            return Err(r.bad(SPEC, format!("the magic is not {MAGIC:#x}")));
        }
        let flags = r.u16()?;
        let code = r.u16()?;
        // FUA goes with everything; whether a hole may be made and whether that must be fast, with WRITE_ZEROES alone. The
        // latter was not offered.
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
                return Err(r.bad(SPEC, "FLUSH is about the whole disk: offset and length are 0"));
            }
            CommandKind::Read | CommandKind::Write if length > TRANSFER_BYTES => {
                return Err(r.bad(SPEC, format!("{length} bytes, at most {TRANSFER_BYTES}")));
            }
            _ if offset.checked_add(length.into()).is_none_or(|end| end > len_bytes) => {
                let rule = format!("{length} bytes at {offset} lie outside of a disk of {len_bytes} bytes");
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

/// Appends a simple reply; `error` is 0, or an errno of NBD's.
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
