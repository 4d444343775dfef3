//! Passes file descriptors over a Unix socket, and reads the credentials of its peer.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt,
};

use super::Channel;
use crate::error::{Direction, TransportError};
use crate::group::Wait;

/// The byte that descriptors travel with: the kernel sends descriptors only together with data.
const CARRIER: u8 = b'D';

/// The process and user at the other end of a Unix socket.
///
/// It is the process that connected, or the one that called `listen`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerCredentials {
    /// Process id in this process's pid namespace; 0 if the peer has none there.
    pub pid: i32,
    /// User id of the peer.
    pub uid: u32,
}

impl PeerCredentials {
    /// The effective user id of this process, for a comparison with [`PeerCredentials::uid`].
    pub fn own_uid() -> u32 {
        rustix::process::geteuid().as_raw()
    }
}

impl Channel {
    /// Maximum number of descriptors per call: the kernel's limit.
    pub const MOST_DESCRIPTORS: usize = 253;

    /// Sends descriptors together with one byte. Each is duplicated for the peer.
    ///
    /// The peer must call [`receive_descriptors`](Channel::receive_descriptors) at this position of the stream.
    ///
    /// # Errors
    /// As [`Channel::write_all`]. Also if the channel is not a Unix socket or uses TLS, or if there are more than
    /// [`Channel::MOST_DESCRIPTORS`].
    pub fn send_descriptors(&self, descriptors: &[BorrowedFd<'_>]) -> Result<(), TransportError> {
        let socket = self.unix_socket("sendmsg")?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(Channel::MOST_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(self.system("sendmsg", Errno::TOOMANYREFS.into()));
        }
        let mut wait = Wait::default();
        loop {
            if self.is_shut_down() {
                return Err(self.cancelled());
            }
            match sendmsg(socket, &[IoSlice::new(&[CARRIER])], &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => break,
                Err(error) => self.judge(Direction::Write, error.into(), &mut wait)?,
            }
        }
        self.written.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Receives the descriptors of [`send_descriptors`](Channel::send_descriptors). They are close-on-exec.
    ///
    /// # Errors
    /// As [`Channel::read_exact`]. Also if the byte is not the one that descriptors travel with, or if this process
    /// would exceed its limit of open descriptors.
    pub fn receive_descriptors(&self) -> Result<Vec<OwnedFd>, TransportError> {
        let socket = self.unix_socket("recvmsg")?;
        let mut wait = Wait::default();
        loop {
            if self.is_shut_down() {
                return Err(self.cancelled());
            }
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(Channel::MOST_DESCRIPTORS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut byte = [0];
            let received =
                recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC);
            let received = match received {
                Ok(received) => received,
                Err(error) => {
                    self.judge(Direction::Read, error.into(), &mut wait)?;
                    continue;
                }
            };
            // Owned before any check, so that every early return closes the received descriptors.
            let mut descriptors = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(came) = message {
                    descriptors.extend(came);
                }
            }
            if received.bytes == 0 {
                let (channel, offset) = (self.peer.clone(), self.bytes_read());
                return Err(TransportError::Closed { channel, offset, missing: 1 });
            }
            self.read.fetch_add(1, Ordering::Relaxed);
            if received.flags.contains(ReturnFlags::CTRUNC) {
                return Err(self.system("recvmsg", Errno::MFILE.into()));
            }
            if byte != [CARRIER] {
                let what = "another byte arrived instead of descriptors";
                return Err(self.system("recvmsg", io::Error::new(io::ErrorKind::InvalidData, what)));
            }
            return Ok(descriptors);
        }
    }

    /// The peer's credentials. The kernel recorded them at `connect` (a client) or `listen` (a server).
    ///
    /// # Errors
    /// [`TransportError::System`] if the channel is not a Unix socket.
    pub fn peer_credentials(&self) -> Result<PeerCredentials, TransportError> {
        let socket = self.unix_socket("getsockopt(SO_PEERCRED)")?;
        let credentials = sockopt::socket_peercred(socket)
            .map_err(|error| self.system("getsockopt(SO_PEERCRED)", error.into()))?;
        Ok(PeerCredentials { pid: credentials.pid.as_raw_pid(), uid: credentials.uid.as_raw() })
    }

    fn unix_socket(&self, call: &'static str) -> Result<BorrowedFd<'_>, TransportError> {
        let socket = self.socket().filter(|socket| {
            !self.is_tls() && sockopt::socket_domain(socket) == Ok(rustix::net::AddressFamily::UNIX)
        });
        socket.ok_or_else(|| {
            let what = "descriptors can be sent only over a Unix socket, without TLS";
            self.system(call, io::Error::new(io::ErrorKind::Unsupported, what))
        })
    }
}
