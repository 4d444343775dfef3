//! Descriptors as addresses: handed over, or named by their number.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::FdFlags;
use rustix::net::sockopt;

/// A descriptor that was handed over with an address: whoever connects to the address, or listens at it, first takes
/// it and closes it when its channel is dropped. Nobody else uses it meanwhile. Clones share it; if nobody takes it,
/// it is closed with the last of them.
#[derive(Clone)]
pub struct HandedFd {
    name: String,
    fd: Arc<Mutex<Option<OwnedFd>>>,
}

impl HandedFd {
    /// Hands `fd` over. `name`: what it is called in messages.
    pub fn new(fd: OwnedFd, name: impl Into<String>) -> Self {
        Self { name: name.into(), fd: Arc::new(Mutex::new(Some(fd))) }
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Takes over a descriptor that this process was started with, by its number: for the program on whose command
    /// line the number stood. Works once for each.
    ///
    /// # Safety
    /// If it is open, nobody in this process may own or use it, now or later.
    ///
    /// # Errors
    /// It is not above 2, not open, or close-on-exec: that a descriptor which came with exec is not.
    pub(crate) unsafe fn inherited(name: &str) -> io::Result<Self> {
        let number = number(name)?;
        // SAFETY: borrowed for the two calls below only; a number that is not open is answered by EBADF.
        let given = unsafe { BorrowedFd::borrow_raw(number) };
        let flags = rustix::io::fcntl_getfd(given)?;
        if flags.contains(FdFlags::CLOEXEC) {
            let why = "this process opened it itself, or claimed it before; it was not inherited";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        rustix::io::fcntl_setfd(given, flags | FdFlags::CLOEXEC)?;
        // SAFETY: it is open, and nobody else owns it (the caller's promise).
        Ok(Self::new(unsafe { OwnedFd::from_raw_fd(number) }, name))
    }

    pub(crate) fn take(&self) -> io::Result<OwnedFd> {
        let taken = self.fd.lock().take();
        taken.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the descriptor was used already"))
    }
}

impl fmt::Debug for HandedFd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandedFd").field("name", &self.name).finish_non_exhaustive()
    }
}

impl PartialEq for HandedFd {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.fd, &other.fd)
    }
}

impl Eq for HandedFd {}

impl Hash for HandedFd {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.fd).hash(state);
    }
}

/// A duplicate of the socket that `name`, a number, names. The number itself stays its owner's.
pub(crate) fn duplicate(name: &str) -> io::Result<OwnedFd> {
    // SAFETY: borrowed for the two calls below only; a number that is not open is answered by EBADF.
    let named = unsafe { BorrowedFd::borrow_raw(number(name)?) };
    check(named)?;
    Ok(rustix::io::fcntl_dupfd_cloexec(named, 3)?)
}

/// Takes the socket that was handed over.
pub(crate) fn take(handed: &HandedFd) -> io::Result<OwnedFd> {
    let taken = handed.take()?;
    check(taken.as_fd())?;
    Ok(taken)
}

/// Refuses what is no socket.
fn check(fd: BorrowedFd<'_>) -> io::Result<()> {
    sockopt::socket_type(fd)?;
    Ok(())
}

fn number(name: &str) -> io::Result<i32> {
    name.parse::<i32>().ok().filter(|number| *number > 2).ok_or_else(|| {
        let rule = "only the number of a descriptor above 2 can be used here";
        io::Error::new(io::ErrorKind::InvalidInput, rule)
    })
}
