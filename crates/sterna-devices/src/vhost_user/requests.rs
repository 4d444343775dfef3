//! Receives the requests of a back end on a separate connection.
//!
//! The library's handler is not used, because it keeps the back end's end of the connection open itself. A
//! thread that waits for a message would then wait without end after the back end has ended.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use vmm_sys_util::eventfd::EventFd;

/// Number of the message that reports a change of the configuration space.
const CONFIG_CHANGE_MSG: u32 = 2;
const HEADER_BYTES: usize = 12;
/// Longest permitted body of a message in bytes.
const BODY_MAX: u32 = 4096;
/// Flags of an answer: version 1 of the protocol, and the reply bit.
const REPLY: u32 = 1 | 1 << 2;
/// Flag: the back end waits for an answer.
const NEEDS_REPLY: u32 = 1 << 3;

/// The receiver of a back end's requests. Dropping it closes the connection.
pub(super) struct Requests {
    socket: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Requests {
    /// Receives requests until the back end closes its end, which is returned too. Signals `changed` when the
    /// configuration space has changed. Other requests are answered with an error if the back end waits for
    /// an answer.
    pub(super) fn listen(device: &Arc<str>, changed: EventFd) -> io::Result<(Self, UnixStream)> {
        let (mut ours, theirs) = UnixStream::pair()?;
        let socket = ours.try_clone()?;
        let name = Arc::clone(device);
        let thread = thread::Builder::new().name(format!("asked by {device}")).spawn(move || {
            while let Ok(kind) = take(&mut ours) {
                if kind == CONFIG_CHANGE_MSG {
                    // Fails only if the counter is full, after 2^64 changes that were not read.
                    let _ = changed.write(1);
                } else {
                    tracing::debug!(
                        device = &*name,
                        request = kind,
                        "a back end sends a request that this side does not support"
                    );
                }
            }
            // A back end that broke a rule gets no further answers.
            let _ = ours.shutdown(Shutdown::Both);
        })?;
        Ok((Self { socket, thread: Some(thread) }, theirs))
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        // An error means that the back end has already closed the connection.
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // The panic message was already printed to standard error.
            let _ = thread.join();
        }
    }
}

/// Receives and answers the next message. Returns its number.
fn take(socket: &mut UnixStream) -> io::Result<u32> {
    let mut header = [0; HEADER_BYTES];
    socket.read_exact(&mut header)?;
    let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let (kind, flags, length) = (word(0), word(4), word(8));
    if length > BODY_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    // The kernel closes the message's descriptors, because this call receives none.
    socket.read_exact(&mut vec![0; length as usize])?;
    if flags & NEEDS_REPLY != 0 {
        let result = u64::from(kind != CONFIG_CHANGE_MSG);
        let words = [kind, REPLY, 8].map(u32::to_ne_bytes).concat();
        socket.write_all(&[&words[..], &result.to_ne_bytes()].concat())?;
    }
    Ok(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u32, flags: u32, body: &[u8]) -> Vec<u8> {
        let words = [kind, 1 | flags, body.len() as u32].map(u32::to_ne_bytes).concat();
        [&words[..], body].concat()
    }

    #[test]
    fn change_is_told_and_answered_and_others_are_refused() {
        let changed = EventFd::new(0).expect("an eventfd");
        let ours = changed.try_clone().expect("an eventfd");
        let (_requests, mut theirs) = Requests::listen(&"fs".into(), ours).expect("a thread");
        theirs.write_all(&message(CONFIG_CHANGE_MSG, 0, &[])).expect("room");
        assert_eq!(changed.read().expect("a change"), 1);
        for (kind, result) in [(CONFIG_CHANGE_MSG, 0u64), (6, 1)] {
            theirs.write_all(&message(kind, NEEDS_REPLY, &[7; 20])).expect("room");
            let mut answer = [0; 20];
            theirs.read_exact(&mut answer).expect("an answer");
            assert_eq!((&answer[..4], &answer[12..]), (&kind.to_ne_bytes()[..], &result.to_ne_bytes()[..]));
        }
    }

    #[test]
    fn message_that_is_none_ends_the_connection() {
        let changed = EventFd::new(0).expect("an eventfd");
        let (requests, mut theirs) = Requests::listen(&"fs".into(), changed).expect("a thread");
        theirs.write_all(&[0xff; HEADER_BYTES]).expect("room");
        assert_eq!(theirs.read(&mut [0; 1]).expect("an end"), 0);
        drop(requests);
    }

    #[test]
    fn front_end_that_goes_does_not_wait_for_half_a_message() {
        let changed = EventFd::new(0).expect("an eventfd");
        let (requests, mut theirs) = Requests::listen(&"fs".into(), changed).expect("a thread");
        theirs.write_all(&[0; HEADER_BYTES - 1]).expect("room");
        drop(requests);
        assert_eq!(theirs.read(&mut [0; 1]).expect("an end"), 0);
    }
}
