//! The VMM that sends its machine (`send-migration` with local=on).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::{Machine, OK, command, wire};

/// A connection to which a machine is sent.
#[derive(Debug)]
pub struct Sender(UnixStream);

impl Sender {
    /// Connects.
    ///
    /// # Errors
    /// The error of the system.
    pub fn connect(socket: &Path) -> io::Result<Self> {
        Ok(Self(wire::patient(UnixStream::connect(socket)?)?))
    }

    /// Sends bytes as they are, and descriptors with them.
    ///
    /// # Errors
    /// The error of the system.
    pub fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        wire::send(&self.0, bytes, descriptors)
    }

    /// Sends the header of a request.
    ///
    /// # Errors
    /// The error of the system.
    pub fn header(&self, command: u16, length: u64) -> io::Result<()> {
        self.send(&wire::header(command, length), &[])
    }

    /// The status of the answer. `None`: the peer has closed the connection.
    ///
    /// # Errors
    /// The error of the system.
    pub fn answer(&self) -> io::Result<Option<u16>> {
        Ok(wire::receive(&self.0)?.map(|(status, _)| status))
    }

    /// Sends a request, and waits for its answer.
    ///
    /// # Errors
    /// The error of the system.
    pub fn request(
        &self,
        command: u16,
        payload: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<Option<u16>> {
        self.header(command, payload.len() as u64)?;
        if !payload.is_empty() {
            self.send(payload, descriptors)?;
        }
        self.answer()
    }

    /// Sends everything up to the state. Every answer must be right.
    ///
    /// # Errors
    /// The error of the system, or of the peer.
    pub fn begin(&self, machine: &Machine) -> io::Result<()> {
        let right = |status: Option<u16>| match status {
            Some(OK) => Ok(()),
            other => Err(io::Error::other(format!("answer {other:?}"))),
        };
        right(self.request(command::START, &[], &[])?)?;
        for (slot, file) in machine.slots.iter().zip(machine.memfds()?) {
            right(self.request(command::MEMORY_FD, &slot.number.to_le_bytes(), &[file.as_fd()])?)?;
        }
        right(self.request(command::CONFIG, &machine.config(), &[])?)?;
        right(self.request(command::STATE, &machine.state(), &[])?)
    }
}
