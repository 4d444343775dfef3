//! One connection of a migration: messages and descriptors on a Unix socket.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::time::Timespec;

use super::error::SessionError;
use super::message::{Command, HEADER_BYTES, Request, Response};
use super::stop::{Stop, Woken, is_ready};
use crate::descriptors::Descriptors;

/// Bytes of a payload for which memory is taken before they arrive.
const STEP_BYTES: usize = 1 << 20;
/// Limit of a last answer to a peer, in seconds.
const LAST_ANSWER: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// A connected socket, whose waits end with `stop`.
pub(super) struct Channel<'a> {
    socket: OwnedFd,
    stop: &'a Stop,
    /// How long a wait lasts at most, and whether it ignores `stop`.
    last: Option<Timespec>,
}

impl<'a> Channel<'a> {
    pub(super) fn new(socket: OwnedFd, stop: &'a Stop) -> Self {
        Self { socket, stop, last: None }
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Whether the peer has closed its end.
    pub(super) fn is_closed(&self) -> bool {
        is_ready(self.socket.as_fd(), PollFlags::RDHUP)
    }

    /// From here on the session only takes leave: waits are short, and a stop does not end them.
    pub(super) fn take_leave(&mut self) {
        self.last = Some(LAST_ANSWER);
    }

    /// Receives up to `to.len()` bytes; waits for the first. 0: the peer has closed the connection.
    pub(super) fn read(&self, to: &mut [u8], descriptors: &mut Descriptors) -> Result<usize, SessionError> {
        loop {
            match descriptors.receive(&self.socket, to) {
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(Errno::INTR) => {}
                received => return received.map_err(|error| SessionError::system("recvmsg")(error.into())),
            }
        }
    }

    /// Fills `to`. `false`: the peer has closed the connection before the first byte.
    fn fill(&self, to: &mut [u8], descriptors: &mut Descriptors, during: &str) -> Result<bool, SessionError> {
        let mut done = 0;
        while done < to.len() {
            match self.read(&mut to[done..], descriptors)? {
                0 if done == 0 => return Ok(false),
                0 => {
                    let during = format!("after {done} of {} bytes of {during}", to.len());
                    return Err(SessionError::Closed { during });
                }
                count => done += count,
            }
        }
        Ok(true)
    }

    /// Receives a header. `None`: the peer has closed the connection.
    pub(super) fn header(
        &self,
        descriptors: &mut Descriptors,
    ) -> Result<Option<[u8; HEADER_BYTES]>, SessionError> {
        let mut header = [0; HEADER_BYTES];
        Ok(self.fill(&mut header, descriptors, "a header")?.then_some(header))
    }

    /// Receives the payload of a request. Memory is taken as the bytes arrive.
    pub(super) fn payload(
        &self,
        request: &Request,
        descriptors: &mut Descriptors,
    ) -> Result<Vec<u8>, SessionError> {
        let mut payload = Vec::new();
        let mut left = request.payload_bytes;
        let name = request.command.name();
        while left > 0 {
            let (done, count) = (payload.len(), left.min(STEP_BYTES as u64) as usize);
            payload.resize(done + count, 0);
            if !self.fill(&mut payload[done..], descriptors, name)? {
                let during = format!("after {done} of {} bytes of {name}", request.payload_bytes);
                return Err(SessionError::Closed { during });
            }
            left -= count as u64;
        }
        Ok(payload)
    }

    /// Sends a request, and waits for its answer.
    pub(super) fn request(
        &self,
        command: Command,
        payload: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), SessionError> {
        self.write(&Request::new(command, payload.len() as u64).encode(), None)?;
        self.write(payload, descriptor)?;
        let during =
            || SessionError::Closed { during: format!("instead of an answer to {}", command.name()) };
        let mut descriptors = Descriptors::default();
        let header = self.header(&mut descriptors)?.ok_or_else(during)?;
        let response = Response::decode(&header)?;
        if !response.is_ok {
            return Err(SessionError::Refused { command });
        }
        // No answer of this protocol has a payload; the next header would be read out of it.
        if response.payload_bytes > 0 {
            let (bytes, rule) = (response.payload_bytes, "an answer to it has none");
            return Err(super::message::MessageError::Length { command, bytes, rule }.into());
        }
        Ok(())
    }

    pub(super) fn respond(&self, response: Response) -> Result<(), SessionError> {
        self.write(&response.encode(), None)
    }

    /// Sends all bytes; the descriptor goes with the first.
    pub(super) fn write(&self, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> Result<(), SessionError> {
        let mut done = 0;
        while done < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let descriptors = descriptor.filter(|_| done == 0);
            if let Some(descriptor) = &descriptors {
                let has_room =
                    control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(descriptor)));
                debug_assert!(has_room, "there is room for one descriptor");
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&self.socket, &[IoSlice::new(&bytes[done..])], &mut control, flags) {
                Ok(count) => done += count,
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    return Err(SessionError::Closed { during: "while a message was sent to it".to_owned() });
                }
                Err(error) => return Err(SessionError::system("sendmsg")(error.into())),
            }
        }
        Ok(())
    }

    fn wait(&self, events: PollFlags) -> Result<(), SessionError> {
        if let Some(limit) = &self.last {
            let mut polled = [rustix::event::PollFd::from_borrowed_fd(self.socket.as_fd(), events)];
            return match rustix::event::poll(&mut polled, Some(limit)) {
                Ok(count) if count > 0 => Ok(()),
                _ => Err(SessionError::Stopped),
            };
        }
        match self.stop.wait(self.socket.as_fd(), events, None) {
            Ok(Woken::Ready) => Ok(()),
            Ok(_) => Err(SessionError::Stopped),
            Err(error) => Err(SessionError::system("poll")(error)),
        }
    }
}
