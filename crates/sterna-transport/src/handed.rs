//! File descriptors as addresses. The address owns descriptors that are inherited or handed over. A descriptor
//! that is named by its number is duplicated.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::FdFlags;
use rustix::net::sockopt;

/// A descriptor that an address owns until a channel or listener takes it.
///
/// The first connect or listen on the address takes the descriptor, and it is closed when that channel or listener
/// is dropped. No other code may use it meanwhile. Clones share the descriptor. If it is never taken, it is closed
/// with the last clone.
#[derive(Clone)]
pub struct HandedFd {
    name: String,
    fd: Arc<Mutex<Option<OwnedFd>>>,
}

impl HandedFd {
    /// Makes an address part that owns `fd`. `name` is its name in messages.
    pub fn new(fd: OwnedFd, name: impl Into<String>) -> Self {
        Self { name: name.into(), fd: Arc::new(Mutex::new(Some(fd))) }
    }

    /// The name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Takes ownership of a descriptor that this process inherited, by its number.
    ///
    /// It is for programs whose command line contains the number. A descriptor can be claimed once.
    ///
    /// # Safety
    /// If the descriptor is open, no other code in this process may own or use it, now or later.
    ///
    /// # Errors
    /// The number is at most 2, not open, or close-on-exec: a descriptor that was inherited through exec never is.
    pub(crate) unsafe fn inherited(name: &str) -> io::Result<Self> {
        let number = number(name)?;
        // SAFETY: borrowed only for the two calls below. If the number is not open, they return EBADF.
        let given = unsafe { BorrowedFd::borrow_raw(number) };
        let flags = rustix::io::fcntl_getfd(given)?;
        if flags.contains(FdFlags::CLOEXEC) {
            let why = "it was not inherited: this process opened it itself, or claimed it before";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        rustix::io::fcntl_setfd(given, flags | FdFlags::CLOEXEC)?;
        // SAFETY: the descriptor is open, and the caller guarantees that it has no other owner.
        Ok(Self::new(unsafe { OwnedFd::from_raw_fd(number) }, name))
    }

    pub(crate) fn take(&self) -> io::Result<OwnedFd> {
        let taken = self.fd.lock().take();
        taken.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the descriptor was already used"))
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

/// Duplicates the socket whose descriptor number is `name`. The original stays with its owner.
pub(crate) fn duplicate(name: &str) -> io::Result<OwnedFd> {
    // SAFETY: borrowed only for the two calls below. If the number is not open, they return EBADF.
    let named = unsafe { BorrowedFd::borrow_raw(number(name)?) };
    check(named)?;
    Ok(rustix::io::fcntl_dupfd_cloexec(named, 3)?)
}

/// Takes the descriptor and checks that it is a socket.
pub(crate) fn take(handed: &HandedFd) -> io::Result<OwnedFd> {
    let taken = handed.take()?;
    check(taken.as_fd())?;
    Ok(taken)
}

/// Returns an error if the descriptor is not a socket.
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
