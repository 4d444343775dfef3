//! Ends the waits of a session.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

/// An event that ends waits, once and for all.
#[derive(Debug)]
pub(super) struct Stop(OwnedFd);

/// What ended a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Woken {
    /// The descriptor is ready.
    Ready,
    Stopped,
    /// The time is over.
    Late,
}

impl Stop {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(super) fn set(&self) {
        // An eventfd whose counter is set accepts a write.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub(super) fn is_set(&self) -> bool {
        is_ready(self.0.as_fd(), PollFlags::IN)
    }

    /// Waits for `time`.
    pub(super) fn wait_alone(&self, time: Timespec) -> io::Result<Woken> {
        self.wait(self.0.as_fd(), PollFlags::empty(), Some(time))
    }

    /// Waits until `descriptor` is ready, at most `limit`.
    pub(super) fn wait(
        &self,
        descriptor: BorrowedFd<'_>,
        events: PollFlags,
        limit: Option<Timespec>,
    ) -> io::Result<Woken> {
        loop {
            let mut polled = [
                PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(descriptor, events),
            ];
            match poll(&mut polled, limit.as_ref()) {
                Ok(0) => return Ok(Woken::Late),
                Ok(_) if !polled[0].revents().is_empty() => return Ok(Woken::Stopped),
                Ok(_) => return Ok(Woken::Ready),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Whether one of these events of the descriptor is there now.
pub(super) fn is_ready(descriptor: BorrowedFd<'_>, events: PollFlags) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(descriptor, events)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&now)).is_ok_and(|count| count > 0)
}
