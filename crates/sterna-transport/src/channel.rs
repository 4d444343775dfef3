//! One connection of a migration, over a socket or over another transport such as RDMA.

pub(crate) mod descriptors;
mod medium;
mod peeked;
pub(crate) mod piece;
mod silence;
mod tcp;
#[cfg(feature = "tls")]
mod underlying;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use sterna_ram::{RamFault, RamSlice};

use crate::error::{Direction, TransportError};
use crate::group::{ChannelGroup, Wait};
use crate::parts::IoPart;
use crate::parts::{Part, Place, Remaining, own};
use crate::socket;
use crate::stream::{ByteStream, StreamError};
use crate::tls::session::Session;
use medium::{Medium, Unmoved};

/// One connected stream socket, or a [`ByteStream`] in its place.
///
/// One thread may read while another thread writes, and a third may shut the channel down. If several threads
/// call in the same direction, they must take turns: otherwise the bytes of their calls can be interleaved.
#[derive(Debug)]
pub struct Channel {
    medium: Medium,
    peer: String,
    read: AtomicU64,
    written: AtomicU64,
    shut: AtomicBool,
    /// Nanoseconds; 0 for no limit.
    stall_limit: AtomicU64,
    /// The channels whose traffic counts when silence on this channel is measured.
    group: OnceLock<Arc<ChannelGroup>>,
    /// True if silence here counts even while other channels of the group receive bytes.
    is_alone: AtomicBool,
    /// Bytes that were peeked at and not read yet. Readers look here only if `has_peeked` is true.
    peeked: Mutex<Vec<u8>>,
    has_peeked: AtomicBool,
    /// Set by the handshake.
    tls: OnceLock<Session>,
    /// Locked by the thread whose turn it is to write.
    turn: Mutex<()>,
    /// Round trip of the TCP handshake, before any data was queued. `None` on other connections.
    first_round_trip: Option<Duration>,
}

impl Channel {
    /// Bytes that were written and have not left this host.
    ///
    /// The cause is the network, or a peer that does not read. Bytes in flight do not count. Over a Unix socket
    /// the kernel counts the memory of its buffers, so the value is somewhat larger than the unread bytes. 0 if
    /// the kernel does not report it.
    pub fn unsent_bytes(&self) -> u64 {
        self.medium.unsent_bytes()
    }

    /// Whether the channel encrypts its bytes with TLS.
    pub fn is_tls(&self) -> bool {
        self.tls.get().is_some()
    }

    /// The distinguished name in the peer's certificate; `None` if the peer sent no certificate.
    pub fn tls_peer(&self) -> Option<&str> {
        self.tls.get().and_then(Session::peer_name)
    }

    /// A value that identifies this TLS session at both ends (`tls-exporter` of RFC 9266).
    ///
    /// No other session has the same value.
    ///
    /// `None` without TLS, and with TLS 1.2.
    pub fn tls_binding(&self) -> Option<[u8; 32]> {
        self.tls.get().and_then(Session::binding)
    }

    /// Makes a channel of a connected stream socket, which the channel then owns.
    ///
    /// # Errors
    /// [`TransportError::System`] if the descriptor is not a connected stream socket.
    pub fn from_fd(socket: OwnedFd) -> Result<Channel, TransportError> {
        let peer = socket::describe(socket.as_fd());
        Self::adopt(socket, peer)
    }

    /// Two channels that are connected to each other inside this process.
    ///
    /// # Errors
    /// [`TransportError::System`] if the kernel refuses the socket pair.
    pub fn pair() -> Result<(Channel, Channel), TransportError> {
        let flags = SocketFlags::CLOEXEC;
        let (one, other) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(|error| TransportError::System {
                channel: "socket pair".to_owned(),
                call: "socketpair",
                source: error.into(),
            })?;
        Ok((Self::adopt(one, "socket pair".into())?, Self::adopt(other, "socket pair".into())?))
    }

    pub(crate) fn adopt(socket: OwnedFd, peer: String) -> Result<Channel, TransportError> {
        socket::prepare(socket.as_fd()).map_err(|(call, source)| TransportError::System {
            channel: peer.clone(),
            call,
            source,
        })?;
        Ok(Self::of(Medium::Socket(socket), peer))
    }

    /// Makes a channel over a connection that is not a socket. `peer` names it in messages. It cannot carry TLS.
    pub fn over(stream: Arc<dyn ByteStream>, peer: impl Into<String>) -> Channel {
        Self::of(Medium::Stream(stream), peer.into())
    }

    fn of(medium: Medium, peer: String) -> Channel {
        let first_round_trip = medium.socket().and_then(socket::delivery).map(|delivery| delivery.round_trip);
        Channel {
            medium,
            peer,
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
            shut: AtomicBool::new(false),
            stall_limit: AtomicU64::new(0),
            group: OnceLock::new(),
            is_alone: AtomicBool::new(false),
            peeked: Mutex::new(Vec::new()),
            has_peeked: AtomicBool::new(false),
            tls: OnceLock::new(),
            turn: Mutex::new(()),
            first_round_trip,
        }
    }

    /// Converts an error of the underlying stream into an error of this channel.
    ///
    /// Callers that use the stream directly, next to the channel, need it.
    pub fn stream_error(&self, direction: Direction, error: StreamError) -> TransportError {
        let (name, offset) = (self.peer.clone(), self.offset(direction));
        match error {
            StreamError::Quiet => {
                let after = self.stall_limit().unwrap_or_default();
                TransportError::Stalled { channel: name, direction, offset, after }
            }
            #[cfg(feature = "rdma")]
            StreamError::Rdma(error) => match error {
                error if error.is_cancelled() => self.cancelled(),
                error if error.is_end() => {
                    let source = io::Error::new(io::ErrorKind::ConnectionReset, error);
                    TransportError::Reset { channel: name, direction, offset, source }
                }
                error => TransportError::Rdma { channel: name, direction, offset, source: error },
            },
            StreamError::Protocol(source) => {
                TransportError::Protocol { channel: name, direction, offset, source }
            }
        }
    }

    /// The underlying socket; `None` if the channel runs over a [`ByteStream`].
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.medium.socket()
    }

    /// Waits until it is the caller's turn to write. The turn ends when the returned guard is dropped.
    ///
    /// Threads that write whole messages take turns this way. The write calls themselves do not check it.
    pub fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }

    /// Reads until the buffer is full.
    ///
    /// # Errors
    /// [`TransportError::Closed`], [`TransportError::Reset`], [`TransportError::Stalled`],
    /// [`TransportError::Cancelled`], [`TransportError::System`].
    pub fn read_exact(&self, to: &mut [u8]) -> Result<(), TransportError> {
        let got = self.take_peeked(to.len(), |bytes| to[..bytes.len()].copy_from_slice(bytes))?;
        self.receive_all(&[own(&mut to[got..])])
    }

    /// Reads the available bytes: at least one, at most the size of the buffer. 0 means that the peer closed.
    ///
    /// # Errors
    /// As [`Channel::read_exact`], without `Closed`.
    pub fn read_some(&self, to: &mut [u8]) -> Result<usize, TransportError> {
        let got = self.take_peeked(to.len(), |bytes| to[..bytes.len()].copy_from_slice(bytes))?;
        if got > 0 || to.is_empty() {
            return Ok(got);
        }
        self.read_once(&Remaining::new(&[own(to)]), false)
    }

    /// Fills windows of guest RAM, in order, directly from the socket.
    ///
    /// # Errors
    /// As [`Channel::read_exact`]. Bytes that arrived before the error are already in RAM.
    pub fn read_into_ram(&self, parts: &[RamSlice<'_>]) -> Result<(), TransportError> {
        if !self.has_peeked.load(Ordering::Acquire) {
            return self.receive_all(parts);
        }
        for part in parts {
            let mut failed = None;
            let got = self.take_peeked(part.len(), |bytes| {
                if let Some(head) = part.part(0, bytes.len()) {
                    failed = head.copy_from(bytes).err();
                }
            })?;
            if let Some(fault) = failed {
                return Err(self.failed_memory(fault));
            }
            if let Some(rest) = part.part(got, part.len() - got) {
                self.receive_all(&[rest])?;
            }
        }
        Ok(())
    }

    /// Fills windows of guest RAM and then a buffer, in one system call if possible.
    ///
    /// This reads a payload together with the start of the next message. After an error, [`Channel::bytes_read`] tells
    /// how many bytes were read.
    ///
    /// # Errors
    /// As [`Channel::read_into_ram`].
    pub fn read_into_ram_then(&self, parts: &[RamSlice<'_>], then: &mut [u8]) -> Result<(), TransportError> {
        if self.has_peeked.load(Ordering::Acquire) {
            self.read_into_ram(parts)?;
            return self.read_exact(then);
        }
        let then = own(then);
        let all: Vec<Place<'_>> =
            parts.iter().map(|part| Place::Ram(*part)).chain([Place::Own(&then)]).collect();
        self.receive_all(&all)
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// [`TransportError::Reset`], [`TransportError::Stalled`], [`TransportError::Cancelled`],
    /// [`TransportError::System`].
    pub fn write_all(&self, bytes: &[u8]) -> Result<(), TransportError> {
        self.write_parts(&[IoPart::Bytes(bytes)])
    }

    /// Writes all parts, in order, with as few system calls as the kernel allows.
    ///
    /// # Errors
    /// As [`Channel::write_all`].
    pub fn write_parts(&self, parts: &[IoPart<'_>]) -> Result<(), TransportError> {
        let mut left = Remaining::new(parts);
        while left.bytes() > 0 {
            let moved = self.write_once(&left)?;
            left.advance(moved);
        }
        Ok(())
    }

    /// Ends the connection, from any thread: blocked and later calls fail with [`TransportError::Cancelled`].
    ///
    /// Bytes that were written before may still arrive at the peer.
    pub fn shutdown(&self) {
        self.shut.store(true, Ordering::SeqCst);
        self.medium.shutdown();
    }

    /// Ends the reading direction, from any thread. Blocked and later reads find the end of the stream.
    ///
    /// Writing remains possible.
    pub fn finish_reading(&self) {
        self.medium.finish_reading();
    }

    /// Closes the writing direction. The peer reads all bytes and then the end of the stream.
    ///
    /// # Errors
    /// [`TransportError::System`] if the connection has already ended. With TLS, which first sends its closing alert,
    /// also the errors of [`Channel::write_all`].
    pub fn finish_writing(&self) -> Result<(), TransportError> {
        // The peer must find the end of the stream even if the alert could not be sent.
        let said = self.say_goodbye();
        let closed = self.medium.finish_writing().map_err(|unmoved| match unmoved {
            Unmoved::System(error) => self.system("shutdown", error),
            Unmoved::Memory(fault) => self.failed_memory(fault),
            Unmoved::Stream(error) => self.stream_error(Direction::Write, error),
        });
        said.and(closed)
    }

    /// Sends the closing alert of TLS. It proves to the peer that no data was cut off. Does nothing without TLS.
    ///
    /// QEMU requires the alert on multifd channels (specs/stream.md §3.7).
    ///
    /// # Errors
    /// As [`Channel::write_all`].
    pub fn say_goodbye(&self) -> Result<(), TransportError> {
        self.tls.get().map_or(Ok(()), |session| session.say_goodbye(self))
    }

    /// Whether [`Channel::shutdown`] was called.
    pub fn is_shut_down(&self) -> bool {
        self.shut.load(Ordering::SeqCst)
    }

    /// Bytes that reads have returned so far.
    pub fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Bytes of writes that the kernel has accepted so far.
    pub fn bytes_written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// The host at the other end of a TCP connection. `None` on every other connection.
    pub fn peer_host(&self) -> Option<IpAddr> {
        let peer = rustix::net::getpeername(self.socket()?).ok()??;
        Some(SocketAddr::try_from(peer).ok()?.ip().to_canonical())
    }

    /// The name of the other end, for messages.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    fn receive_all<P: Part>(&self, parts: &[P]) -> Result<(), TransportError> {
        let mut left = Remaining::new(parts);
        while left.bytes() > 0 {
            let moved = self.read_once(&left, true)?;
            if moved == 0 {
                return Err(TransportError::Closed {
                    channel: self.peer.clone(),
                    offset: self.bytes_read(),
                    missing: left.bytes(),
                });
            }
            left.advance(moved);
        }
        Ok(())
    }

    /// Reads at least one byte, or 0 at the end of the stream. `whole`: the kernel should wait until all is there.
    fn read_once<P: Part>(&self, left: &Remaining<'_, P>, whole: bool) -> Result<usize, TransportError> {
        let moved = match self.tls.get() {
            Some(session) => session.read(self, left)?,
            None => self.once(Direction::Read, left, whole)?,
        };
        self.count_read(moved);
        Ok(moved)
    }

    fn count_read(&self, moved: usize) {
        self.read.fetch_add(moved as u64, Ordering::Relaxed);
        if moved > 0
            && let Some(group) = self.group.get()
        {
            group.note_read();
        }
    }

    fn write_once<P: Part>(&self, left: &Remaining<'_, P>) -> Result<usize, TransportError> {
        let moved = match self.tls.get() {
            Some(session) => session.write(self, left)?,
            None => self.once(Direction::Write, left, true)?,
        };
        self.written.fetch_add(moved as u64, Ordering::Relaxed);
        Ok(moved)
    }

    /// Repeats the system call until bytes move, the stream ends or it fails. `whole`: the kernel should wait for all.
    fn once<P: Part>(
        &self,
        direction: Direction,
        left: &Remaining<'_, P>,
        whole: bool,
    ) -> Result<usize, TransportError> {
        let mut wait = Wait::default();
        loop {
            if self.is_shut_down() {
                return Err(self.cancelled());
            }
            let limit = || match direction {
                Direction::Read => self.look(),
                Direction::Write => self.stall_limit(),
            };
            let result = self.medium.once(direction, left, whole, limit);
            // After a shutdown of this side, every result is a consequence of that shutdown.
            if self.is_shut_down() {
                return Err(self.cancelled());
            }
            match result {
                Ok(moved) => return Ok(moved),
                Err(Unmoved::System(error)) => self.judge(direction, error, &mut wait)?,
                Err(Unmoved::Memory(fault)) => return Err(self.failed_memory(fault)),
                // The channel decides whether the silence exceeds its stall limit.
                Err(Unmoved::Stream(StreamError::Quiet)) => {
                    self.judge(direction, rustix::io::Errno::AGAIN.into(), &mut wait)?;
                }
                Err(Unmoved::Stream(error)) => return Err(self.stream_error(direction, error)),
            }
        }
    }

    /// Returns an error if the call must end, and `Ok` if it may be repeated.
    pub(crate) fn judge(
        &self,
        direction: Direction,
        error: io::Error,
        wait: &mut Wait,
    ) -> Result<(), TransportError> {
        let offset = self.offset(direction);
        let channel = || self.peer.clone();
        match error.raw_os_error() {
            Some(call @ (libc::EINTR | libc::EAGAIN)) => {
                // Another thread may have removed the limit during the wait.
                let Some(after) = self.stall_limit() else { return Ok(()) };
                let silent = match self.company() {
                    Some(group) if direction == Direction::Read => {
                        wait.others.get_or_insert_with(|| group.watch()).silent_for()
                    }
                    _ if call == libc::EAGAIN => after,
                    // The kernel's timer restarts with each call. Repeated signals must not extend the limit.
                    _ => wait.began.get_or_insert_with(Instant::now).elapsed(),
                };
                if silent < after {
                    return Ok(());
                }
                Err(TransportError::Stalled { channel: channel(), direction, offset, after })
            }
            Some(
                libc::EPIPE
                | libc::ECONNRESET
                | libc::ECONNABORTED
                | libc::ETIMEDOUT
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::ENETDOWN
                | libc::ENOTCONN,
            ) => Err(TransportError::Reset { channel: channel(), direction, offset, source: error }),
            _ => Err(self.system(
                match direction {
                    Direction::Read => "recvmsg",
                    Direction::Write => "sendmsg",
                },
                error,
            )),
        }
    }

    /// Bytes moved in one direction so far.
    fn offset(&self, direction: Direction) -> u64 {
        match direction {
            Direction::Read => self.bytes_read(),
            Direction::Write => self.bytes_written(),
        }
    }

    pub(crate) fn cancelled(&self) -> TransportError {
        TransportError::Cancelled { channel: self.peer.clone() }
    }

    /// The error for a page of guest RAM that failed while this process copied it.
    pub(crate) fn failed_memory(&self, fault: RamFault) -> TransportError {
        TransportError::FailedMemory { channel: self.peer.clone(), fault }
    }

    pub(crate) fn system(&self, call: &'static str, source: io::Error) -> TransportError {
        TransportError::System { channel: self.peer.clone(), call, source }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // A TLS server may have sent session tickets, which this side never reads. If unread bytes remain, the
        // kernel answers the close with a reset, and the reset could overtake the last bytes that were written.
        if let Some(session) = self.tls.get() {
            session.discard_unread(self);
        }
    }
}
