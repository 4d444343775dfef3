//! Events of a connection, collected from the threads that notice them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use super::abi::*;
use crate::rdma::event::Event;

/// Stores a connection's events until they are polled. Wakes its waiting threads when it ends.
#[derive(Debug)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
    /// An eventfd that is readable after the end.
    ended: OwnedFd,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Event>,
    end: Option<Event>,
    is_destroyed: bool,
}

impl Mailbox {
    pub(crate) fn new() -> io::Result<Self> {
        let ended = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { state: Mutex::default(), ended })
    }

    /// Adds an event. The first event that ends the connection stays its end, and is returned once.
    pub(crate) fn put(&self, event: Event) {
        let mut state = self.state.lock();
        if event.is_end() {
            if state.end.is_some() {
                return;
            }
            state.end = Some(event.clone());
            self.wake();
        }
        state.events.push_back(event);
    }

    pub(crate) fn take(&self) -> Option<Event> {
        self.state.lock().events.pop_front()
    }

    pub(crate) fn end(&self) -> Option<Event> {
        self.state.lock().end.clone()
    }

    /// Marks the queue pair as being destroyed and wakes the waiting threads.
    pub(crate) fn destroy(&self) {
        self.state.lock().is_destroyed = true;
        self.wake();
    }

    pub(crate) fn is_destroyed(&self) -> bool {
        self.state.lock().is_destroyed
    }

    fn wake(&self) {
        // The write cannot fail: the counter is far from full and the descriptor is open.
        let _ = rustix::io::write(&self.ended, &1u64.to_ne_bytes());
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }
}

/// Converts a connection manager's event that concerns a connection.
pub(crate) fn of_manager(kind: u32) -> Option<Event> {
    match kind {
        RDMA_CM_EVENT_ESTABLISHED => Some(Event::Established),
        RDMA_CM_EVENT_DISCONNECTED => Some(Event::Disconnected),
        RDMA_CM_EVENT_DEVICE_REMOVAL => Some(Event::DeviceRemoved),
        _ => None,
    }
}

/// Converts a device's asynchronous event.
pub(crate) fn of_device(kind: u32) -> Option<Event> {
    let fatal = |what: &str| Some(Event::Fatal(what.to_owned()));
    match kind {
        IBV_EVENT_PORT_ACTIVE => Some(Event::PortUp),
        IBV_EVENT_PORT_ERR => Some(Event::PortDown),
        IBV_EVENT_CQ_ERR => fatal("a completion queue overflowed or failed"),
        IBV_EVENT_QP_FATAL => fatal("the queue pair failed"),
        IBV_EVENT_QP_REQ_ERR => fatal("the peer's request was invalid"),
        IBV_EVENT_QP_ACCESS_ERR => fatal("the peer's request was not allowed"),
        IBV_EVENT_DEVICE_FATAL => fatal("the device failed"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(mailbox: &Mailbox) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut fds = [PollFd::from_borrowed_fd(mailbox.as_fd(), PollFlags::IN)];
        poll(&mut fds, Some(&now)).unwrap() == 1
    }

    #[test]
    fn end_is_the_first_one_and_is_given_once() {
        let mailbox = Mailbox::new().unwrap();

        mailbox.put(Event::Established);
        assert!(!is_readable(&mailbox) && mailbox.end().is_none());
        mailbox.put(Event::Disconnected);
        mailbox.put(Event::DeviceRemoved);

        assert!(is_readable(&mailbox));
        assert_eq!(mailbox.end(), Some(Event::Disconnected));
        assert_eq!(
            [mailbox.take(), mailbox.take(), mailbox.take()],
            [Some(Event::Established), Some(Event::Disconnected), None]
        );
    }

    #[test]
    fn destroying_wakes_without_an_event() {
        let mailbox = Mailbox::new().unwrap();

        mailbox.destroy();

        assert!(is_readable(&mailbox) && mailbox.is_destroyed());
        assert_eq!((mailbox.take(), mailbox.end()), (None, None));
    }
}
