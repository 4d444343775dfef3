//! A channel as TLS uses it: it moves records.

use std::io;
use std::sync::atomic::Ordering;

use rustix::event::{PollFd, PollFlags, poll};
use sterna_ram::RamFault;

use super::Channel;
use crate::cancel::timespec;
use crate::error::{Direction, TransportError};
use crate::group::Wait;
use crate::parts::{IoPart, Remaining};
use crate::tls::problem::TlsProblem;
use crate::tls::session::Session;
use crate::tls::underlying::Underlying;

impl Channel {
    /// Whether no byte has moved yet.
    pub(crate) fn is_unused(&self) -> bool {
        self.bytes_read() + self.bytes_written() == 0 && !self.has_peeked.load(Ordering::Acquire)
    }

    /// Makes all later bytes use `session`.
    pub(crate) fn encrypt(&self, session: Session) -> Result<(), TransportError> {
        self.tls.set(session).map_err(|_| {
            let twice = io::Error::new(io::ErrorKind::AlreadyExists, "the channel already uses TLS");
            self.system("start_tls", twice)
        })
    }
}

impl Underlying for Channel {
    /// Sends bytes on the socket itself: TLS records.
    fn send_raw(&self, bytes: &[u8]) -> Result<(), TransportError> {
        let parts = [IoPart::Bytes(bytes)];
        let mut left = Remaining::new(&parts);
        while left.bytes() > 0 {
            let moved = self.once(Direction::Write, &left, true)?;
            left.advance(moved);
        }
        Ok(())
    }

    /// Receives TLS records from the socket, without waiting.
    fn receive_now(&self, to: &mut [u8]) -> io::Result<usize> {
        let socket = self.socket().ok_or(rustix::io::Errno::NOTSOCK)?;
        Ok(rustix::net::recv(socket, to, rustix::net::RecvFlags::DONTWAIT)?.0)
    }

    /// Waits until the socket is readable or at its end; at most the stall limit.
    fn wait_readable(&self) -> Result<(), TransportError> {
        let mut wait = Wait::default();
        let Some(socket) = self.socket() else { return Ok(()) };
        loop {
            let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
            match poll(&mut fds, self.look().map(timespec).as_ref()) {
                Ok(0) => self.judge(Direction::Read, rustix::io::Errno::AGAIN.into(), &mut wait)?,
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {
                    self.judge(Direction::Read, rustix::io::Errno::INTR.into(), &mut wait)?;
                }
                Err(error) => return Err(self.system("poll", error.into())),
            }
        }
    }

    fn judge(&self, direction: Direction, error: io::Error, wait: &mut Wait) -> Result<(), TransportError> {
        Channel::judge(self, direction, error, wait)
    }

    fn is_shut_down(&self) -> bool {
        Channel::is_shut_down(self)
    }

    fn bytes_read(&self) -> u64 {
        Channel::bytes_read(self)
    }

    fn cancelled(&self) -> TransportError {
        Channel::cancelled(self)
    }

    fn failed_memory(&self, fault: RamFault) -> TransportError {
        Channel::failed_memory(self, fault)
    }

    fn tls_error(&self, problem: TlsProblem) -> TransportError {
        TransportError::Tls { channel: self.peer.clone(), problem }
    }
}
