//! Ending a wait from another thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// Ends connects and accepts that wait under it, now and ever after. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub struct CancelFlag {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    cancelled: AtomicBool,
    /// One descriptor for each wait that is going on.
    waits: Mutex<Vec<Weak<OwnedFd>>>,
}

impl CancelFlag {
    /// A flag that is not cancelled.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends every wait under this flag. From any thread, any number of times.
    pub fn cancel(&self) {
        self.inner.cancelled.store(true, Ordering::SeqCst);
        let waits = self.inner.waits.lock();
        for wait in waits.iter().filter_map(Weak::upgrade) {
            // It cannot fail: the counter is far from full and the descriptor is open.
            let _ = rustix::io::write(&*wait, &1u64.to_ne_bytes());
        }
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.inner.cancelled.load(Ordering::SeqCst)
    }

    /// A descriptor that becomes readable when the flag is cancelled (at once if it was).
    fn wake(&self) -> io::Result<Arc<OwnedFd>> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut waits = self.inner.waits.lock();
        waits.retain(|wait| wait.strong_count() > 0);
        waits.push(Arc::downgrade(&wake));
        drop(waits);
        // `cancel` sets the flag before it walks the list: either it finds us or we see the flag.
        if self.is_cancelled() {
            rustix::io::write(&*wake, &1u64.to_ne_bytes())?;
        }
        Ok(wake)
    }
}

/// How a wait ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    Ready,
    Cancelled,
    TimedOut,
}

/// Waits until `fd` is ready for `what`, one of the flags is cancelled, or the deadline passes.
pub(crate) fn wait(
    fd: BorrowedFd<'_>,
    what: PollFlags,
    flags: &[&CancelFlag],
    deadline: Option<Instant>,
) -> io::Result<Waited> {
    wait_any(&[(fd, what)], flags, deadline)
}

/// The same for several descriptors: until any of them is ready.
pub(crate) fn wait_any(
    ready: &[(BorrowedFd<'_>, PollFlags)],
    flags: &[&CancelFlag],
    deadline: Option<Instant>,
) -> io::Result<Waited> {
    let wakes = flags.iter().map(|flag| flag.wake()).collect::<io::Result<Vec<_>>>()?;
    loop {
        if flags.iter().any(|flag| flag.is_cancelled()) {
            return Ok(Waited::Cancelled);
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let mut fds: Vec<PollFd<'_>> =
            ready.iter().map(|(fd, what)| PollFd::from_borrowed_fd(*fd, *what)).collect();
        fds.extend(wakes.iter().map(|wake| PollFd::from_borrowed_fd(wake.as_fd(), PollFlags::IN)));
        match poll(&mut fds, left.map(timespec).as_ref()) {
            Ok(_) if fds[..ready.len()].iter().any(|fd| !fd.revents().is_empty()) => {
                return Ok(Waited::Ready);
            }
            Ok(0) if left.is_some() => return Ok(Waited::TimedOut),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

pub(crate) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
