//! Receives the VMM's message and its descriptor, without blocking.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use sterna_ram::peer_memory::PeerMemory;

use crate::descriptors::Descriptors;
use crate::error::GuestError;
use crate::handshake::{self, Handshake, HandshakeError, LONGEST};
use crate::peer::Peer;

/// A connection whose handshake is not complete.
pub(crate) struct Arrival {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: Peer,
    bytes: Vec<u8>,
    descriptors: Descriptors,
}

impl Arrival {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        let peer = Peer::of(&socket);
        Self { socket, peer, bytes: Vec::new(), descriptors: Descriptors::default() }
    }

    /// Whether the peer has sent something, so that it is probably a VMM that waits for its pages.
    pub(crate) fn has_spoken(&self) -> bool {
        !self.bytes.is_empty() || self.descriptors.count() > 0
    }

    /// Number of bytes that have arrived.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Whether the regions have arrived, so that only the descriptor is missing.
    pub(crate) fn lacks_descriptor(&self) -> bool {
        self.descriptors.count() == 0 && matches!(handshake::decode(&self.bytes), Ok(Some(_)))
    }

    /// Receives what has arrived. `None`: more must come.
    pub(crate) fn receive(&mut self) -> Result<Option<(Handshake, PeerMemory)>, GuestError> {
        let is_closed = self.read_all().map_err(|error| GuestError::Connection(Arc::new(error)))?;
        let message = handshake::decode(&self.bytes)?;
        let count = self.descriptors.count();
        if count > 1 {
            return Err(HandshakeError::Descriptors { count }.into());
        }
        let Some(message) = message else {
            let closed = HandshakeError::Closed { bytes: self.bytes.len() };
            return if is_closed { Err(closed.into()) } else { Ok(None) };
        };
        // The descriptor may come with a later byte than the first.
        match self.descriptors.pop() {
            Some(descriptor) => {
                let memory = PeerMemory::new(descriptor);
                let memory = memory.map_err(|error| HandshakeError::NoUserfaultfd { found: error.found })?;
                Ok(Some((message, memory)))
            }
            None if is_closed => Err(HandshakeError::Descriptors { count: 0 }.into()),
            None => Ok(None),
        }
    }

    /// Reads until nothing is left. Returns whether the peer has closed the connection.
    fn read_all(&mut self) -> io::Result<bool> {
        let mut buffer = [0; 4096];
        while self.bytes.len() <= LONGEST && !self.descriptors.are_too_many() {
            match self.descriptors.receive(&self.socket, &mut buffer) {
                Ok(0) => return Ok(true),
                Ok(count) => self.bytes.extend_from_slice(&buffer[..count]),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(false)
    }
}
