//! Detects the end of a connection, which the back end's end causes. No bytes are read, because they belong
//! to the thread that waits for an answer.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// Adds the end of the connection to `events`, as `data`. The event remains set after it has occurred.
pub(super) fn watch(socket: &UnixStream, events: &Epoll, data: u64) -> io::Result<()> {
    let end = EpollEvent::new(EventSet::READ_HANG_UP, data);
    events.ctl(ControlOperation::Add, socket.as_raw_fd(), end)
}

/// Whether the connection has ended. False if this cannot be checked; the next request then fails.
pub(super) fn has_come(socket: &UnixStream) -> bool {
    let look = || {
        let events = Epoll::new()?;
        watch(socket, &events, 0)?;
        events.wait(0, &mut [EpollEvent::default()])
    };
    look().is_ok_and(|count: usize| count > 0)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn end_is_seen_and_a_message_is_none() {
        let (ours, mut theirs) = UnixStream::pair().expect("sockets");
        assert!(!has_come(&ours));
        theirs.write_all(b"an answer").expect("room");
        assert!(!has_come(&ours));
        drop(theirs);
        assert!(has_come(&ours));
    }
}
