//! Descriptors that come with the bytes of a Unix socket.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

/// Descriptors for which one read has room. More than one is an error of the peer.
const ROOM: usize = 16;

/// The descriptors that have come.
#[derive(Debug, Default)]
pub(crate) struct Descriptors {
    came: Vec<OwnedFd>,
    /// The kernel dropped some.
    is_cut: bool,
}

impl Descriptors {
    /// Number of descriptors that came; one more if the kernel dropped some.
    pub(crate) fn count(&self) -> usize {
        self.came.len() + usize::from(self.is_cut)
    }

    /// Whether more have come than any peer needs.
    pub(crate) fn are_too_many(&self) -> bool {
        self.came.len() > ROOM
    }

    /// Takes the last one.
    pub(crate) fn pop(&mut self) -> Option<OwnedFd> {
        self.came.pop()
    }

    /// Receives bytes without blocking, and keeps the descriptors that come with them. 0 bytes: the peer has closed the
    /// connection.
    pub(crate) fn receive(&mut self, socket: &OwnedFd, to: &mut [u8]) -> Result<usize, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ROOM))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = match recvmsg(socket, &mut [IoSliceMut::new(to)], &mut control, flags) {
            Err(Errno::CONNRESET) => return Ok(0),
            received => received?,
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                self.came.extend(came);
            }
        }
        self.is_cut |= received.flags.contains(ReturnFlags::CTRUNC);
        Ok(received.bytes)
    }
}
