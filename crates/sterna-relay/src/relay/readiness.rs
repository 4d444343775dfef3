//! Whether a VMM's connection has bytes or has ended.

use std::io;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, send, sockopt};
use sterna_transport::Channel;

use crate::frame::DATA_BYTES;

/// Whether both directions of the connection are closed by the VMM.
pub(super) fn is_hung_up(channel: &Channel) -> bool {
    let events = events(channel, PollFlags::empty(), 0);
    events.is_ok_and(|events| events.intersects(PollFlags::HUP | PollFlags::ERR))
}

/// Waits until the connection has bytes or an end, at most `limit_ms`.
pub(super) fn is_readable(channel: &Channel, limit_ms: i64) -> bool {
    events(channel, PollFlags::IN, limit_ms).is_ok_and(|events| !events.is_empty())
}

/// Whether the connection takes a few bytes at once.
pub(super) fn is_writable(channel: &Channel) -> bool {
    events(channel, PollFlags::OUT, 0).is_ok_and(|events| events == PollFlags::OUT)
}

/// Lets a Unix socket take a whole frame at once. The kernel may grant less.
pub(super) fn widen(channel: &Channel) {
    let Some(socket) = channel.socket() else { return };
    if matches!(sockopt::socket_domain(socket), Ok(AddressFamily::UNIX)) {
        // Its usual buffer has less than a frame.
        let _ = sockopt::set_socket_send_buffer_size(socket, 2 * DATA_BYTES);
    }
}

/// Writes as many bytes as the connection takes at once: 0 if it takes none. The connection has no TLS.
pub(super) fn write_now(channel: &Channel, bytes: &[u8]) -> io::Result<usize> {
    let socket = channel.socket().ok_or(io::ErrorKind::Unsupported)?;
    match send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(count) => Ok(count),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// Bytes that a read would return now; 0 at an end, too.
pub(super) fn waiting_bytes(channel: &Channel) -> usize {
    let count = channel.socket().and_then(|socket| rustix::io::ioctl_fionread(socket).ok());
    count.and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
}

fn events(channel: &Channel, wanted: PollFlags, limit_ms: i64) -> io::Result<PollFlags> {
    let socket = channel.socket().ok_or(io::ErrorKind::Unsupported)?;
    let mut fds = [PollFd::from_borrowed_fd(socket, wanted)];
    let limit = Timespec { tv_sec: limit_ms / 1000, tv_nsec: limit_ms % 1000 * 1_000_000 };
    match poll(&mut fds, Some(&limit)) {
        Ok(_) => Ok(fds[0].revents()),
        Err(Errno::INTR) => Ok(PollFlags::empty()),
        Err(error) => Err(error.into()),
    }
}
