//! Cancels waits that have no channel to shut down yet, from another thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// A flag that, once set, ends all connects and accepts that use it. Clones share the flag.
#[derive(Debug, Clone, Default)]
pub struct CancelFlag {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    cancelled: AtomicBool,
    /// One eventfd for each wait in progress.
    waits: Mutex<Vec<Weak<OwnedFd>>>,
    /// Flags that are cancelled with this one.
    children: Mutex<Vec<Weak<Inner>>>,
}

impl CancelFlag {
    /// A flag that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// A flag that is cancelled together with this one, or alone.
    ///
    /// Waits with child flags of their own can end each other without ending the others.
    pub fn child(&self) -> Self {
        let child = Self::new();
        let mut children = self.inner.children.lock();
        children.retain(|child| child.strong_count() > 0);
        children.push(Arc::downgrade(&child.inner));
        drop(children);
        // `cancel` sets the flag before it walks the list, so a child that the walk misses sees the flag here.
        if self.is_cancelled() {
            child.cancel();
        }
        child
    }

    /// Ends every wait that uses this flag, now and later. Any thread may call it, more than once.
    pub fn cancel(&self) {
        self.inner.cancelled.store(true, Ordering::SeqCst);
        for wait in self.inner.waits.lock().iter().filter_map(Weak::upgrade) {
            // The write cannot fail: the counter is far from full and the descriptor is open.
            let _ = rustix::io::write(&*wait, &1u64.to_ne_bytes());
        }
        let children: Vec<_> = self.inner.children.lock().iter().filter_map(Weak::upgrade).collect();
        children.into_iter().for_each(|inner| Self { inner }.cancel());
    }

    /// Whether [`CancelFlag::cancel`] was called on this flag or a parent.
    pub fn is_cancelled(&self) -> bool {
        self.inner.cancelled.load(Ordering::SeqCst)
    }

    /// A descriptor that becomes readable when the flag is cancelled later. The caller asks
    /// [`CancelFlag::is_cancelled`] afterwards.
    fn wake(&self) -> io::Result<Arc<OwnedFd>> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let mut waits = self.inner.waits.lock();
        waits.retain(|wait| wait.strong_count() > 0);
        waits.push(Arc::downgrade(&wake));
        Ok(wake)
    }
}

/// Outcome of a wait.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    Ready,
    Cancelled,
    TimedOut,
}

/// Waits until `fd` is ready for `what`, a flag is cancelled, or the deadline passes.
pub(crate) fn wait(
    fd: BorrowedFd<'_>,
    what: PollFlags,
    flags: &[&CancelFlag],
    deadline: Option<Instant>,
) -> io::Result<Waited> {
    wait_any(&[(fd, what)], flags, deadline)
}

/// As [`wait`], for several descriptors: returns when any of them is ready.
pub(crate) fn wait_any(
    ready: &[(BorrowedFd<'_>, PollFlags)],
    flags: &[&CancelFlag],
    deadline: Option<Instant>,
) -> io::Result<Waited> {
    let wakes = flags.iter().map(|flag| flag.wake()).collect::<io::Result<Vec<_>>>()?;
    loop {
        // `cancel` sets the flag before it walks the list. So the walk finds the descriptor, or this check sees the
        // flag. No descriptor is written here: a thread that only waits needs no `write` in its filter.
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
