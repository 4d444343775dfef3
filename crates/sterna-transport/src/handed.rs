//! File descriptors as addresses. The address owns descriptors that are inherited or handed over. A descriptor
//! that is named by its number is duplicated.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::FileType;
use rustix::io::FdFlags;
use rustix::net::{AddressFamily, SocketAddrAny, SocketType, getpeername, getsockname, sockopt};

use crate::error::{DescriptorProblem, TransportError};
use crate::socket;

/// A descriptor that an address owns until a channel or listener takes it.
///
/// The first connect or listen on the address takes the descriptor, and it is closed when that channel or listener
/// is dropped. No other code may use it meanwhile. Clones share the descriptor. If it is never taken, it is closed
/// with the last clone.
#[derive(Clone)]
pub struct HandedFd {
    name: String,
    fd: Arc<Mutex<Option<OwnedFd>>>,
    is_listening: bool,
    is_pipe: bool,
}

impl HandedFd {
    /// Makes an address part that owns `fd`. `name` is its name in messages.
    pub fn new(fd: OwnedFd, name: impl Into<String>) -> Self {
        let is_listening = socket::is_listening(fd.as_fd()).unwrap_or(false);
        let kind = rustix::fs::fstat(&fd).map(|status| FileType::from_raw_mode(status.st_mode));
        let is_pipe = kind.is_ok_and(|kind| kind == FileType::Fifo);
        Self { name: name.into(), fd: Arc::new(Mutex::new(Some(fd))), is_listening, is_pipe }
    }

    /// As [`HandedFd::new`], for a listening stream socket. Its name is the address at which it listens.
    ///
    /// # Errors
    /// [`TransportError::Descriptor`]; `fd` is then closed.
    pub(crate) fn listener(fd: OwnedFd) -> Result<Self, TransportError> {
        let refused = |why| TransportError::Descriptor { needed: "a listening stream socket", why };
        check_stream(fd.as_fd()).map_err(refused)?;
        if !socket::is_listening(fd.as_fd()).map_err(|error| refused(DescriptorProblem::System(error)))? {
            let is_connected = getpeername(&fd).is_ok();
            let why =
                if is_connected { DescriptorProblem::Connected } else { DescriptorProblem::NotListening };
            return Err(refused(why));
        }
        let name = spelled(getsockname(&fd), fd.as_fd());
        Ok(Self::new(fd, name))
    }

    /// As [`HandedFd::new`], for a connected stream socket. Its name is the peer's address.
    ///
    /// # Errors
    /// [`TransportError::Descriptor`]; `fd` is then closed.
    pub(crate) fn connected(fd: OwnedFd) -> Result<Self, TransportError> {
        let refused = |why| TransportError::Descriptor { needed: "a connected stream socket", why };
        check_stream(fd.as_fd()).map_err(refused)?;
        if socket::is_listening(fd.as_fd()).map_err(|error| refused(DescriptorProblem::System(error)))? {
            return Err(refused(DescriptorProblem::Listening));
        }
        if getpeername(&fd).is_err() {
            return Err(refused(DescriptorProblem::NotConnected));
        }
        let name = peer_of(fd.as_fd());
        Ok(Self::new(fd, name))
    }

    /// Whether the descriptor is a listening socket, which accepts any number of connections.
    pub fn is_listening(&self) -> bool {
        self.is_listening
    }

    /// Whether the descriptor is a pipe, which carries bytes in one direction.
    pub fn is_pipe(&self) -> bool {
        self.is_pipe
    }

    /// Takes the descriptor, of which this is the only owner.
    ///
    /// # Errors
    /// `NotFound`: it was taken before.
    pub fn take(&self) -> io::Result<OwnedFd> {
        let taken = self.fd.lock().take();
        taken.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the descriptor was already used"))
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

/// The peer of a connected socket, or this side's address if the peer has none: a Unix socket's client.
pub(crate) fn peer_of(socket: BorrowedFd<'_>) -> String {
    match spelled(getpeername(socket), socket) {
        peer if peer == UNNAMED => spelled(getsockname(socket), socket),
        peer => peer,
    }
}

const UNNAMED: &str = "unix:";

fn spelled<A: Into<Option<SocketAddrAny>>>(name: rustix::io::Result<A>, socket: BorrowedFd<'_>) -> String {
    match name.map(Into::into) {
        Ok(Some(address)) => socket::spell(&address),
        _ => format!("descriptor {}", socket.as_raw_fd()),
    }
}

fn check_stream(fd: BorrowedFd<'_>) -> Result<(), DescriptorProblem> {
    match sockopt::socket_type(fd) {
        Ok(SocketType::STREAM) => {}
        Ok(SocketType::DGRAM) => return Err(DescriptorProblem::Datagram),
        Ok(_) => return Err(DescriptorProblem::NotStream),
        Err(rustix::io::Errno::NOTSOCK) => return Err(DescriptorProblem::NotSocket),
        Err(error) => return Err(DescriptorProblem::System(error.into())),
    }
    match sockopt::socket_domain(fd) {
        Ok(AddressFamily::INET | AddressFamily::INET6 | AddressFamily::UNIX) => Ok(()),
        Ok(_) => Err(DescriptorProblem::OtherFamily),
        Err(error) => Err(DescriptorProblem::System(error.into())),
    }
}

/// Duplicates the socket whose descriptor number is `name`. The original stays with its owner.
pub(crate) fn duplicate(name: &str) -> io::Result<OwnedFd> {
    // SAFETY: borrowed only for the two calls below. If the number is not open, they return EBADF.
    let named = unsafe { BorrowedFd::borrow_raw(number(name)?) };
    check(named)?;
    Ok(rustix::io::fcntl_dupfd_cloexec(named, 3)?)
}

/// Whether the descriptor with this number is a listening socket.
pub(crate) fn is_listening(name: &str) -> bool {
    number(name).is_ok_and(|number| {
        // SAFETY: borrowed only for the call. If the number is not open, it returns EBADF.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        socket::is_listening(descriptor).unwrap_or(false)
    })
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
