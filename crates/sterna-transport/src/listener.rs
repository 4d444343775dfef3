//! Accepts channels at an address, with a time limit and cancellation from another thread.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::address::Address;
use crate::cancel::CancelFlag;
use crate::cancel::{Waited, wait};
use crate::channel::Channel;
use crate::connect::{is_abandoned, resolve};
use crate::error::TransportError;
use crate::socket_names::{listening_at, name_of};
use crate::unix_path::UnixPath;
use crate::{handed, socket};

/// Connections that may wait to be accepted. A migration has fewer channels.
const BACKLOG: i32 = 256;

/// Accepts channels at an address; its socket file is removed on drop.
#[derive(Debug)]
pub struct Listener {
    kind: Kind,
    address: Address,
    closed: CancelFlag,
    /// The socket file that this listener created and must remove, with its inode.
    path: Option<(PathBuf, u64)>,
}

#[derive(Debug)]
enum Kind {
    Listening(OwnedFd),
    /// An inherited descriptor that is already connected. It is accepted once.
    Connected(Mutex<Option<OwnedFd>>),
}

impl Listener {
    /// Starts to listen at `address`.
    ///
    /// A socket file without a listener is replaced; one that is in use is refused. A descriptor may be listening or
    /// connected; `fd:N` duplicates it.
    ///
    /// # Errors
    /// [`TransportError::Bind`] with the error of the kernel, or that the kind of address is not supported.
    pub fn bind(address: &Address) -> Result<Listener, TransportError> {
        Self::try_bind(address)
            .map_err(|source| TransportError::Bind { address: address.to_string(), source })
    }

    fn try_bind(address: &Address) -> io::Result<Listener> {
        let closed = CancelFlag::new();
        let mut path = None;
        let (kind, address) = match address {
            Address::Tcp { host, port } => {
                let (socket, port) = bind_tcp(host, *port, &closed)?;
                (Kind::Listening(socket), Address::Tcp { host: host.clone(), port })
            }
            Address::Unix(wanted) => {
                let socket = bind_unix(wanted)?;
                path = Some((wanted.clone(), std::fs::symlink_metadata(wanted)?.ino()));
                (Kind::Listening(socket), address.clone())
            }
            Address::Fd(name) => (kind_of(handed::duplicate(name)?)?, address.clone()),
            Address::Handed(fd) => {
                let kind = kind_of(handed::take(fd)?)?;
                let address = match &kind {
                    Kind::Listening(socket) => listening_at(socket.as_fd()),
                    Kind::Connected(_) => None,
                };
                (kind, address.unwrap_or_else(|| Address::Handed(fd.clone())))
            }
            // A file has no connections; an RDMA fabric has its own listener.
            _ => return Err(io::ErrorKind::Unsupported.into()),
        };
        Ok(Listener { kind, address, closed, path })
    }

    /// Waits for the next channel. A passed `limit`, `cancel` and [`Listener::close`] end the wait.
    ///
    /// # Errors
    /// [`TransportError::TimedOut`], [`TransportError::Cancelled`], [`TransportError::System`] (also if an inherited
    /// connection was already accepted).
    pub fn accept(&self, limit: Option<Duration>, cancel: &CancelFlag) -> Result<Channel, TransportError> {
        let listening = match &self.kind {
            Kind::Listening(socket) => socket,
            Kind::Connected(socket) => return self.take_connected(socket),
        };
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let waited = wait(listening.as_fd(), PollFlags::IN, &[cancel, &self.closed], deadline)
                .map_err(|error| self.system("poll", error))?;
            match (waited, limit) {
                (Waited::Ready, _) => {}
                (Waited::TimedOut, Some(after)) => {
                    return Err(TransportError::TimedOut {
                        what: "accepting on",
                        address: self.address.to_string(),
                        after,
                    });
                }
                _ => return Err(TransportError::Cancelled { channel: self.address.to_string() }),
            }
            match rustix::net::acceptfrom_with(listening, SocketFlags::CLOEXEC) {
                Ok((socket, peer)) => {
                    let peer = match peer {
                        Some(peer) if matches!(self.address, Address::Tcp { .. }) => socket::spell(&peer),
                        _ => self.address.to_string(),
                    };
                    return Channel::adopt(socket, peer);
                }
                // The client has already disconnected, or another thread accepted the connection.
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
                Err(error) => return Err(self.system("accept", error.into())),
            }
        }
    }

    /// The address, with the port that the kernel chose if the given one was 0. For a descriptor that was handed over:
    /// the address at which it listens, if an [`Address`] can name it.
    pub fn local_address(&self) -> Address {
        self.address.clone()
    }

    /// Whether this is a connected descriptor, which is accepted once.
    pub fn is_one_channel(&self) -> bool {
        matches!(self.kind, Kind::Connected(_))
    }

    /// Ends every `accept` call, from any thread. The socket itself is closed when the listener is dropped.
    pub fn close(&self) {
        self.closed.cancel();
    }

    fn take_connected(&self, socket: &Mutex<Option<OwnedFd>>) -> Result<Channel, TransportError> {
        let socket = socket.lock().take();
        match socket {
            Some(socket) => {
                let peer = name_of(&self.address, socket.as_fd());
                Channel::adopt(socket, peer)
            }
            None => Err(self.system(
                "accept",
                io::Error::other("an inherited connection is one channel and cannot accept a second"),
            )),
        }
    }

    fn system(&self, call: &'static str, source: io::Error) -> TransportError {
        TransportError::System { channel: self.address.to_string(), call, source }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some((path, inode)) = &self.path {
            // The inode is compared because another process may have created a new socket file at the path.
            if std::fs::symlink_metadata(path).is_ok_and(|found| found.ino() == *inode) {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// Whether an inherited descriptor is listening or connected.
fn kind_of(socket: OwnedFd) -> io::Result<Kind> {
    if socket::is_listening(socket.as_fd())? {
        rustix::io::ioctl_fionbio(&socket, true)?;
        return Ok(Kind::Listening(socket));
    }
    Ok(Kind::Connected(Mutex::new(Some(socket))))
}

fn bind_tcp(host: &str, port: u16, cancel: &CancelFlag) -> io::Result<(OwnedFd, u16)> {
    let host = if host.is_empty() { "::" } else { host };
    let mut addresses = resolve(host, port, None, cancel)?;
    if host == "::" {
        // For machines without IPv6.
        addresses.push((std::net::Ipv4Addr::UNSPECIFIED, port).into());
    }
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in addresses {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let bound = listening(family, |socket| {
            sockopt::set_socket_reuseaddr(socket, true)?;
            rustix::net::bind(socket, &address)
        });
        match bound {
            Ok(socket) => {
                let name = rustix::net::getsockname(&socket)?;
                let port = std::net::SocketAddr::try_from(name).map_or(port, |name| name.port());
                return Ok((socket, port));
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn bind_unix(path: &Path) -> io::Result<OwnedFd> {
    let short = UnixPath::new(path)?;
    let address = SocketAddrUnix::new(short.as_path())?;
    let bind = || listening(AddressFamily::UNIX, |socket| rustix::net::bind(socket, &address));
    match bind() {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
                return Err(error);
            }
            if !is_abandoned(path).unwrap_or(false) {
                return Err(error);
            }
            std::fs::remove_file(path)?;
            bind()
        }
        result => result,
    }
}

fn listening(
    family: AddressFamily,
    bind: impl Fn(&OwnedFd) -> rustix::io::Result<()>,
) -> io::Result<OwnedFd> {
    // Non-blocking, so that `accept()` does not block when a client disconnects before it is accepted.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    bind(&socket)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}
