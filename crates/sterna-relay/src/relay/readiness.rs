//! Whether a VMM's connection has bytes or has ended.

use std::io;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sterna_transport::Channel;

/// Whether both directions of the connection are closed by the VMM.
pub(super) fn is_hung_up(channel: &Channel) -> bool {
    let events = events(channel, PollFlags::empty(), 0);
    events.is_ok_and(|events| events.intersects(PollFlags::HUP | PollFlags::ERR))
}

/// Waits until the connection has bytes or an end, at most `limit_ms`.
pub(super) fn is_readable(channel: &Channel, limit_ms: i64) -> bool {
    events(channel, PollFlags::IN, limit_ms).is_ok_and(|events| !events.is_empty())
}

fn events(channel: &Channel, wanted: PollFlags, limit_ms: i64) -> io::Result<PollFlags> {
    let socket = channel.socket().ok_or(io::ErrorKind::Unsupported)?;
    let mut fds = [PollFd::from_borrowed_fd(socket, wanted)];
    let limit = Timespec { tv_sec: limit_ms / 1000, tv_nsec: limit_ms % 1000 * 1_000_000 };
    match poll(&mut fds, Some(&limit)) {
        Ok(_) => Ok(fds[0].revents()),
        Err(rustix::io::Errno::INTR) => Ok(PollFlags::empty()),
        Err(error) => Err(error.into()),
    }
}
