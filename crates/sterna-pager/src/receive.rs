//! Receives the VMM's message and its descriptor, without blocking.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use sterna_ram::peer_memory::PeerMemory;

use crate::error::GuestError;
use crate::handshake::{self, Handshake, HandshakeError, LONGEST};
use crate::peer::Peer;

/// Descriptors for which a message has room. More than one is an error.
const ROOM: usize = 16;

/// A connection whose handshake is not complete.
pub(crate) struct Arrival {
    pub(crate) socket: OwnedFd,
    pub(crate) peer: Peer,
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    /// Descriptors that the kernel dropped.
    is_cut: bool,
}

impl Arrival {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        let peer = Peer::of(&socket);
        Self { socket, peer, bytes: Vec::new(), descriptors: Vec::new(), is_cut: false }
    }

    /// Whether the peer has sent something, so that it is probably a VMM that waits for its pages.
    pub(crate) fn has_spoken(&self) -> bool {
        !self.bytes.is_empty() || !self.descriptors.is_empty()
    }

    /// Number of bytes that have arrived.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Whether the regions have arrived, so that only the descriptor is missing.
    pub(crate) fn lacks_descriptor(&self) -> bool {
        self.descriptors.is_empty() && matches!(handshake::decode(&self.bytes), Ok(Some(_)))
    }

    /// Receives what has arrived. `None`: more must come.
    pub(crate) fn receive(&mut self) -> Result<Option<(Handshake, PeerMemory)>, GuestError> {
        let is_closed = self.read_all().map_err(|error| GuestError::Connection(Arc::new(error)))?;
        let message = handshake::decode(&self.bytes)?;
        let count = self.descriptors.len() + usize::from(self.is_cut);
        if count > 1 {
            return Err(HandshakeError::Descriptors { count }.into());
        }
        match (message, self.descriptors.pop()) {
            (Some(message), Some(descriptor)) => {
                let memory = PeerMemory::new(descriptor);
                let memory = memory.map_err(|error| HandshakeError::NoUserfaultfd { found: error.found })?;
                Ok(Some((message, memory)))
            }
            (Some(_), None) if is_closed => Err(HandshakeError::Descriptors { count: 0 }.into()),
            (None, _) if is_closed => Err(HandshakeError::Closed { bytes: self.bytes.len() }.into()),
            // The descriptor may come with a later byte than the first.
            (_, descriptor) => {
                self.descriptors.extend(descriptor);
                Ok(None)
            }
        }
    }

    /// Reads until nothing is left. Returns whether the peer has closed the connection.
    fn read_all(&mut self) -> io::Result<bool> {
        let mut buffer = [0; 4096];
        while self.bytes.len() <= LONGEST && self.descriptors.len() <= ROOM {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ROOM))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let received =
                match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, flags) {
                    Ok(received) => received,
                    Err(Errno::AGAIN) => return Ok(false),
                    Err(Errno::INTR) => continue,
                    Err(Errno::CONNRESET) => return Ok(true),
                    Err(error) => return Err(error.into()),
                };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(came) = message {
                    self.descriptors.extend(came);
                }
            }
            self.is_cut |= received.flags.contains(ReturnFlags::CTRUNC);
            if received.bytes == 0 {
                return Ok(true);
            }
            self.bytes.extend_from_slice(&buffer[..received.bytes]);
        }
        Ok(false)
    }
}
