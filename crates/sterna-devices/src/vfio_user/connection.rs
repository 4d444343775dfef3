//! A socket that sends and receives whole messages with their descriptors, within a time limit.
//!
//! After a wait that ends too early, the connection remains usable unless a message was sent in part. The
//! remaining bytes of an abandoned message are skipped before the next one is read.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::wire::{HEADER_BYTES, Header, MAX_MESSAGE_FDS, WireError};

/// Why a message was not sent or received.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The time limit was exceeded.
    Late,
    /// The other side closed the connection between two messages.
    Closed,
    /// The connection broke inside a message, or was closed here.
    Broken(io::Error),
    /// The other side broke the protocol. The connection is closed here.
    Wire(WireError),
    /// A system call failed.
    System(&'static str, io::Error),
}

pub(super) struct Connection {
    socket: UnixStream,
    /// Highest length of a message in bytes.
    limit: u32,
    /// The received part of a header.
    head: [u8; HEADER_BYTES],
    have: usize,
    /// Bytes of the present message that were not received yet.
    left: usize,
    /// Descriptors received with the present message.
    fds: Vec<OwnedFd>,
    given_up: bool,
}

impl Connection {
    pub(super) fn new(socket: UnixStream, limit: u32) -> Self {
        let (head, have, left, fds) = ([0; HEADER_BYTES], 0, 0, Vec::new());
        Self { socket, limit, head, have, left, fds, given_up: false }
    }

    /// Closes the connection, because no later message can be decoded.
    pub(super) fn give_up(&mut self) {
        self.given_up = true;
        // Fails if the other side has already shut down, with the same effect.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    /// Sends a message of `parts`, with `fds` attached to its first byte.
    pub(super) fn send(
        &mut self,
        parts: [&[u8]; 3],
        fds: &[BorrowedFd<'_>],
        deadline: Option<Instant>,
    ) -> Result<(), Trouble> {
        self.check()?;
        let total: usize = parts.iter().map(|part| part.len()).sum();
        let mut sent = 0;
        while sent < total {
            let rest = rest_of(parts, sent);
            let slices = rest.map(IoSlice::new);
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MESSAGE_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if sent == 0 && !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                let source = io::Error::other(format!("{} descriptors in one message", fds.len()));
                return Err(Trouble::System("sendmsg", source));
            }
            match sendmsg(&self.socket, &slices, &mut control, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(more) => sent += more,
                Err(Errno::AGAIN) => {
                    if let Err(trouble) = self.wait(PollFlags::OUT, deadline) {
                        // The other side could not decode anything after a partial message.
                        if sent > 0 {
                            self.give_up();
                        }
                        return Err(trouble);
                    }
                }
                Err(Errno::INTR) => {}
                Err(error) => {
                    self.give_up();
                    return Err(Trouble::Broken(error.into()));
                }
            }
        }
        Ok(())
    }

    /// Receives the next message's header.
    pub(super) fn receive_header(&mut self, deadline: Option<Instant>) -> Result<Header, Trouble> {
        self.skip_body(deadline)?;
        while self.have < HEADER_BYTES {
            let (mut head, have) = (self.head, self.have);
            if have == 0 {
                self.fds.clear();
            }
            match self.receive(&mut head[have..], deadline)? {
                0 if have == 0 => {
                    self.give_up();
                    return Err(Trouble::Closed);
                }
                0 => return Err(self.cut()),
                more => self.have += more,
            }
            self.head = head;
        }
        self.have = 0;
        match Header::decode(&self.head, self.limit) {
            Ok(header) => {
                self.left = header.payload_bytes();
                Ok(header)
            }
            Err(error) => {
                self.give_up();
                Err(Trouble::Wire(error))
            }
        }
    }

    /// Bytes of the present message that were not received yet.
    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// Receives the next bytes of the present message, which must have as many.
    pub(super) fn receive_body(&mut self, to: &mut [u8], deadline: Option<Instant>) -> Result<(), Trouble> {
        assert!(to.len() <= self.left, "{} bytes wanted of {}", to.len(), self.left);
        let mut got = 0;
        while got < to.len() {
            match self.receive(&mut to[got..], deadline)? {
                0 => return Err(self.cut()),
                more => {
                    got += more;
                    self.left -= more;
                }
            }
        }
        Ok(())
    }

    /// Skips the rest of the present message.
    pub(super) fn skip_body(&mut self, deadline: Option<Instant>) -> Result<(), Trouble> {
        let mut room = [0; 4096];
        while self.left > 0 {
            let some = self.left.min(room.len());
            self.receive_body(&mut room[..some], deadline)?;
        }
        Ok(())
    }

    /// Takes the descriptors received with the present message.
    pub(super) fn take_fds(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.fds)
    }

    /// Whether the other side still has the connection open, without sending a request.
    pub(super) fn is_open(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let is_gone = poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().intersects(gone);
        !self.given_up && !is_gone
    }

    fn receive(&mut self, to: &mut [u8], deadline: Option<Instant>) -> Result<usize, Trouble> {
        self.check()?;
        loop {
            // Checked before every read, because a peer that sends without pause would never let this thread
            // wait.
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(Trouble::Late);
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_MESSAGE_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            match recvmsg(&self.socket, &mut [IoSliceMut::new(to)], &mut control, flags) {
                Ok(received) => {
                    for message in control.drain() {
                        if let RecvAncillaryMessage::ScmRights(fds) = message {
                            self.fds.extend(fds);
                        }
                    }
                    if received.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > MAX_MESSAGE_FDS {
                        let got = self.fds.len();
                        self.give_up();
                        let rule = "a message has at most 8";
                        return Err(Trouble::Wire(WireError::Descriptors { message: "message", got, rule }));
                    }
                    return Ok(received.bytes);
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, deadline)?,
                Err(Errno::INTR) => {}
                Err(error) => {
                    self.give_up();
                    return Err(Trouble::Broken(error.into()));
                }
            }
        }
    }

    fn wait(&self, what: PollFlags, deadline: Option<Instant>) -> Result<(), Trouble> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Err(Trouble::Late);
            }
            let left = left.map(timespec);
            match poll(&mut [PollFd::new(&self.socket, what)], left.as_ref()) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(Trouble::System("poll", error.into())),
            }
        }
    }

    fn check(&self) -> Result<(), Trouble> {
        if self.given_up {
            return Err(Trouble::Broken(io::Error::other("it was closed after an earlier failure")));
        }
        Ok(())
    }

    fn cut(&mut self) -> Trouble {
        self.give_up();
        Trouble::Broken(io::Error::new(io::ErrorKind::UnexpectedEof, "it ends inside a message"))
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// The bytes of `parts` after the first `done`.
fn rest_of(parts: [&[u8]; 3], mut done: usize) -> [&[u8]; 3] {
    parts.map(|part| {
        let skipped = done.min(part.len());
        done -= skipped;
        &part[skipped..]
    })
}
