//! Descriptors over a Unix socket, and who is at its other end.

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
use crate::group::Wait;
use crate::{Direction, TransportError};

/// The byte that descriptors travel with: the kernel carries none without a byte.
const CARRIER: u8 = b'D';

/// Who opened, or listens at, the other end of a Unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerCredentials {
    /// The process, as this process's namespace counts; 0 where it has none there.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
}

impl PeerCredentials {
    /// The user for which this process acts.
    pub fn own_uid() -> u32 {
        rustix::process::geteuid().as_raw()
    }
}

impl Channel {
    /// Most descriptors that one call sends: the kernel takes no more at once.
    pub const MOST_DESCRIPTORS: usize = 253;

    /// Sends descriptors, with one byte. Each is duplicated for the peer, which must call
    /// [`receive_descriptors`](Channel::receive_descriptors) at this place of the stream.
    ///
    /// # Errors
    /// As [`Channel::write_all`]. Only Unix sockets carry descriptors, and at most [`Channel::MOST_DESCRIPTORS`] at once.
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

    /// Receives what [`send_descriptors`](Channel::send_descriptors) has sent. They are closed when a program is executed.
    ///
    /// # Errors
    /// As [`Channel::read_exact`]; also where another byte than that of descriptors comes, or this process may not have so many.
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
            // Whatever is wrong with it, what came is closed.
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
                let what = "another byte came where descriptors were due";
                return Err(self.system("recvmsg", io::Error::new(io::ErrorKind::InvalidData, what)));
            }
            return Ok(descriptors);
        }
    }

    /// Who is at the other end, as the kernel has noted when the connection was made (a client) or listened for (a server).
    ///
    /// # Errors
    /// It is no Unix socket.
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
            let what = "descriptors go over a Unix socket alone, without TLS";
            self.system(call, io::Error::new(io::ErrorKind::Unsupported, what))
        })
    }
}
