//! The transport below a channel: a socket, or a [`ByteStream`] such as RDMA. The channel's logic is the same for
//! both.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::Shutdown;
use sterna_ram::RamFault;

use crate::cancel::timespec;
use crate::error::Direction;
use crate::parts::{Part, Remaining};
use crate::socket;
use crate::stream::ByteStream;
use crate::stream::StreamError;

/// Size in bytes of the buffer between memory and a stream that is not a socket.
const PIECE: usize = 256 << 10;

#[derive(Debug)]
pub(super) enum Medium {
    Socket(OwnedFd),
    Stream(Arc<dyn ByteStream>),
}

/// Reason why a call moved no byte.
pub(super) enum Unmoved {
    /// An error of the kernel, which the channel judges. EAGAIN: the time limit of one call passed.
    System(io::Error),
    /// A page of guest RAM failed while this process copied it.
    Memory(RamFault),
    /// An error of the stream. [`StreamError::Quiet`]: the time limit of one call passed.
    Stream(StreamError),
}

impl Medium {
    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Medium::Socket(socket) => Some(socket.as_fd()),
            Medium::Stream(_) => None,
        }
    }

    /// One call that moves bytes or finds the end of the stream.
    ///
    /// `whole`: the kernel should wait for all bytes. `limit` is the longest wait of one call; sockets have their own.
    pub(super) fn once<P: Part>(
        &self,
        direction: Direction,
        left: &Remaining<'_, P>,
        whole: bool,
        limit: impl FnOnce() -> Option<Duration>,
    ) -> Result<usize, Unmoved> {
        match (self, direction) {
            (Medium::Socket(socket), Direction::Read) => {
                socket::receive(socket.as_fd(), left, whole).map_err(Unmoved::System)
            }
            (Medium::Socket(socket), Direction::Write) => {
                socket::send(socket.as_fd(), left).map_err(Unmoved::System)
            }
            (Medium::Stream(stream), _) => over_stream(&**stream, direction, left, limit()),
        }
    }

    pub(super) fn shutdown(&self) {
        match self {
            // Fails only if the connection has already ended.
            Medium::Socket(socket) => drop(rustix::net::shutdown(socket, Shutdown::Both)),
            Medium::Stream(stream) => stream.shutdown(),
        }
    }

    pub(super) fn finish_reading(&self) {
        match self {
            // Fails only if the connection has already ended.
            Medium::Socket(socket) => drop(rustix::net::shutdown(socket, Shutdown::Read)),
            Medium::Stream(stream) => stream.finish_reading(),
        }
    }

    pub(super) fn finish_writing(&self) -> Result<(), Unmoved> {
        match self {
            Medium::Socket(socket) => {
                rustix::net::shutdown(socket, Shutdown::Write).map_err(|error| Unmoved::System(error.into()))
            }
            Medium::Stream(stream) => stream.finish_writing().map_err(Unmoved::Stream),
        }
    }

    pub(super) fn peer_has_closed(&self) -> bool {
        match self {
            Medium::Socket(socket) => {
                let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
                matches!(poll(&mut fds, Some(&timespec(Duration::ZERO))), Ok(1..))
            }
            Medium::Stream(stream) => stream.peer_has_closed(),
        }
    }

    pub(super) fn unsent_bytes(&self) -> u64 {
        match self {
            Medium::Socket(socket) => socket::queued(socket.as_fd()),
            Medium::Stream(stream) => stream.unsent_bytes(),
        }
    }
}

/// Moves bytes between memory and a stream, through a buffer.
fn over_stream<P: Part>(
    stream: &dyn ByteStream,
    direction: Direction,
    left: &Remaining<'_, P>,
    limit: Option<Duration>,
) -> Result<usize, Unmoved> {
    let mut places = left.clone();
    let mut buffer = vec![0; PIECE.min(usize::try_from(left.bytes()).unwrap_or(PIECE))];
    let moved = match direction {
        Direction::Read => {
            let count = stream.read(&mut buffer, limit);
            places.put_bytes(&buffer[..*count.as_ref().unwrap_or(&0)]);
            count
        }
        Direction::Write => {
            let count = places.take_bytes(&mut buffer);
            match places.fault() {
                // The buffer holds no valid copy of a failed page, so nothing is sent.
                Some(_) => Ok(0),
                None => stream.write(&buffer[..count], limit),
            }
        }
    };
    match places.fault() {
        Some(fault) => Err(Unmoved::Memory(fault)),
        None => moved.map_err(Unmoved::Stream),
    }
}
