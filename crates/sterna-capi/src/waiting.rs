//! Descriptors for event loops, and the last wait before a handle is freed.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use parking_lot::Mutex;
use sterna::EventFd;

use crate::boundary::Done;
use crate::error::{Failure, STERNA_ERROR_SYSTEM};

/// Time between two looks whether a freed migration can still end by itself.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// A handle's eventfd, made when the program asks for it.
#[derive(Default)]
pub(crate) struct Descriptor(Mutex<Option<EventFd>>);

impl Descriptor {
    /// The number of the descriptor, which belongs to the handle.
    pub(crate) fn number(&self, make: impl FnOnce() -> io::Result<EventFd>) -> Done<i32> {
        let mut made = self.0.lock();
        let fd = match made.take() {
            Some(fd) => fd,
            None => make()
                .map_err(|error| Failure::new(STERNA_ERROR_SYSTEM, format!("making an eventfd: {error}")))?,
        };
        Ok(made.insert(fd).as_fd().as_raw_fd())
    }
}

/// The limit of a wait; `None` for a negative number of milliseconds: without limit.
pub(crate) fn limit(timeout_ms: i64) -> Option<Duration> {
    u64::try_from(timeout_ms).ok().map(Duration::from_millis)
}
