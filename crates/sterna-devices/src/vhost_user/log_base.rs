//! Sends SET_LOG_BASE over the front end's socket, without the library (specs/vhost-user.md §2).
//!
//! The protocol requires an answer but does not define its content. Back ends in C answer with a 64-bit word,
//! those in Rust with the request's own body. The library accepts only the latter and would wait without end
//! for it. This module reads an answer of the length in its header.

use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use sterna_ram::dirty::VhostLog;

/// Number of the request.
const SET_LOG_BASE: u32 = 6;
/// Version 1 of the protocol, in the lowest bits of the flags.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
/// Flag of an answer.
const IS_REPLY: u32 = 1 << 2;
const HEADER_BYTES: usize = 12;
const BODY_BYTES: usize = 16;
/// Longest permitted answer in bytes.
const REPLY_MAX: usize = 16;

/// Why the request failed.
#[derive(Debug)]
pub(super) enum LogBaseError {
    /// The connection to the back end failed.
    Io(io::Error),
    /// The answer breaks a rule.
    Rule(String),
}

/// Gives the back end `log` to record its writes in, and waits for the answer.
pub(super) fn set(socket: &UnixStream, log: &VhostLog) -> Result<(), LogBaseError> {
    send(socket, &request(log.len_bytes(), log.offset()), log.file()).map_err(LogBaseError::Io)?;
    read_reply(socket)
}

fn request(len: u64, offset: u64) -> [u8; HEADER_BYTES + BODY_BYTES] {
    let mut bytes = [0; HEADER_BYTES + BODY_BYTES];
    bytes[0..4].copy_from_slice(&SET_LOG_BASE.to_ne_bytes());
    bytes[4..8].copy_from_slice(&VERSION.to_ne_bytes());
    bytes[8..12].copy_from_slice(&(BODY_BYTES as u32).to_ne_bytes());
    bytes[12..20].copy_from_slice(&len.to_ne_bytes());
    bytes[20..28].copy_from_slice(&offset.to_ne_bytes());
    bytes
}

/// Sends the bytes, with the descriptor attached to the first one.
fn send(socket: &UnixStream, bytes: &[u8], file: BorrowedFd<'_>) -> io::Result<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        let files = [file];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if sent == 0 && !control.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(io::Error::other("no room for a descriptor"));
        }
        match sendmsg(socket, &[IoSlice::new(&bytes[sent..])], &mut control, SendFlags::NOSIGNAL) {
            Ok(n) => sent += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn read_reply(mut socket: &UnixStream) -> Result<(), LogBaseError> {
    let mut header = [0; HEADER_BYTES];
    socket.read_exact(&mut header).map_err(LogBaseError::Io)?;
    let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let (request, flags, len) = (word(0), word(4), word(8) as usize);
    if request != SET_LOG_BASE || flags & IS_REPLY == 0 || flags & VERSION_MASK != VERSION {
        return Err(LogBaseError::Rule(format!("message {request} with flags {flags:#x} is not its answer")));
    }
    if len > REPLY_MAX {
        return Err(LogBaseError::Rule(format!("it has {len} bytes")));
    }
    socket.read_exact(&mut [0; REPLY_MAX][..len]).map_err(LogBaseError::Io)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::thread;

    use sterna_ram::dirty::LoggedRange;
    use sterna_ram::{Backing, GuestRam, RamBlock};

    use super::*;

    fn log() -> VhostLog {
        let block = RamBlock::new("ram", 64 << 12, Backing::Memfd).expect("a block");
        let ram = GuestRam::new(vec![block]).expect("RAM");
        let whole = LoggedRange { guest_address: 0, block: 0, first_page: 0, pages: 64 };
        VhostLog::new(&ram, vec![whole]).expect("a log")
    }

    fn reply(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
        let words = [request, flags, body.len() as u32];
        words.iter().flat_map(|word| word.to_ne_bytes()).chain(body.iter().copied()).collect()
    }

    fn answered_with(reply: Vec<u8>) -> Result<(), LogBaseError> {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        let back_end = thread::spawn(move || {
            let mut request = [0; HEADER_BYTES + BODY_BYTES];
            theirs.read_exact(&mut request).expect("the request");
            theirs.write_all(&reply).expect("room");
            request
        });
        let result = set(&ours, &log());
        let request = back_end.join().expect("no panic");
        assert_eq!(request[..12], reply_header(SET_LOG_BASE, VERSION, 16));
        result
    }

    fn reply_header(request: u32, flags: u32, len: u32) -> [u8; 12] {
        let mut bytes = [0; 12];
        for (at, word) in bytes.chunks_mut(4).zip([request, flags, len]) {
            at.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    #[test]
    fn set_answered_with_a_word_or_the_body_or_nothing_is_done() {
        for body in [0, 8, 16] {
            assert!(answered_with(reply(6, 5, &vec![0; body])).is_ok(), "{body} bytes");
        }
    }

    #[test]
    fn set_answered_with_something_else_says_what() {
        for bad in [reply(7, 5, &[0; 8]), reply(6, 1, &[0; 8]), reply(6, 5, &[0; 17])] {
            assert!(matches!(answered_with(bad), Err(LogBaseError::Rule(_))));
        }
        assert!(matches!(answered_with(reply(6, 5, &[0; 8])[..15].to_vec()), Err(LogBaseError::Io(_))));
    }
}
