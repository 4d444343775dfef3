//! Descriptors that become readable when a migration has news, for VMMs with an event loop.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

/// An eventfd that becomes readable at each event of one migration, and at its end.
///
/// Register it for reading in an event loop. When it is readable, call [`EventFd::clear`] first, and then read the
/// status, the outcome or the arrival: an event in between makes it readable again. Each call of `event_fd` makes an
/// eventfd of its own.
#[derive(Debug)]
pub struct EventFd(Arc<OwnedFd>);

impl EventFd {
    /// Makes the descriptor unreadable until the next event. Returns the number of events since the last call.
    ///
    /// # Errors
    /// The kernel's error of the read.
    pub fn clear(&self) -> io::Result<u64> {
        let mut count = [0; 8];
        match rustix::io::read(&self.0, &mut count) {
            Ok(_) => Ok(u64::from_ne_bytes(count)),
            Err(rustix::io::Errno::AGAIN) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The eventfds of one migration.
#[derive(Debug, Default)]
pub(crate) struct Bell(Mutex<Vec<Weak<OwnedFd>>>);

impl Bell {
    /// A new eventfd. It is readable immediately, because events may have passed.
    pub(crate) fn listener(&self) -> io::Result<EventFd> {
        let fd = Arc::new(eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut fds = self.0.lock();
        fds.retain(|fd| fd.strong_count() > 0);
        fds.push(Arc::downgrade(&fd));
        Ok(EventFd(fd))
    }

    /// Makes every eventfd readable.
    pub(crate) fn ring(&self) {
        for fd in self.0.lock().iter().filter_map(Weak::upgrade) {
            // The only error is a full counter: the descriptor is readable then.
            let _ = rustix::io::write(&fd, &1_u64.to_ne_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_eventfd_counts_events_and_a_dropped_one_is_forgotten() {
        let bell = Bell::default();
        let [one, other] = [0, 1].map(|_| bell.listener().unwrap());
        assert_eq!((one.clear().unwrap(), one.clear().unwrap()), (1, 0));
        bell.ring();
        bell.ring();
        assert_eq!((one.clear().unwrap(), other.clear().unwrap()), (2, 3));
        drop(other);
        let _third = bell.listener().unwrap();
        assert_eq!(bell.0.lock().len(), 2);
    }
}
