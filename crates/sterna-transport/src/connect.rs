//! Connects sockets, with a time limit and a way to cancel from another thread.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use sterna_ram::threads::{HookPanicked, NewThread, ThreadRole};

use crate::address::Address;
use crate::cancel::CancelFlag;
use crate::cancel::{Waited, wait};
use crate::channel::Channel;
use crate::error::TransportError;
use crate::handed;
use crate::socket;
use crate::socket_names::name_of;
use crate::tls::Tls;
use crate::tls::endpoint::TlsEndpoint;
use crate::unix_path::UnixPath;

/// Pause between two attempts to connect to a Unix socket whose queue is full.
const QUEUE_STEP: Duration = Duration::from_millis(5);

/// Connects to a TCP or Unix address within `limit`, for other protocols than migration. The socket is blocking.
///
/// # Errors
/// [`TransportError::Connect`], [`TransportError::TimedOut`], [`TransportError::Cancelled`].
pub fn connect_socket(
    address: &Address,
    limit: Duration,
    cancel: &CancelFlag,
) -> Result<OwnedFd, TransportError> {
    let attempt = Attempt { address, limit, deadline: Instant::now().checked_add(limit), cancel };
    attempt.check()?;
    let socket = match address {
        Address::Tcp { host, port } => attempt.tcp(host, *port)?.0,
        Address::Unix(path) => attempt.unix(path)?,
        _ => return Err(attempt.failed(io::ErrorKind::Unsupported.into())),
    };
    rustix::io::ioctl_fionbio(&socket, false).map_err(|error| attempt.failed(error.into()))?;
    Ok(socket)
}

/// Whether the process that listened at a Unix socket has ended.
///
/// Does not wait, and leaves no connection. A listener with a full queue counts as alive.
///
/// # Errors
/// If connecting to the file fails for another reason, such as missing permission.
pub fn is_abandoned(path: &Path) -> io::Result<bool> {
    let path = UnixPath::new(path)?;
    let address = SocketAddrUnix::new(path.as_path())?;
    // A datagram socket cannot connect to a stream socket, but the error tells whether a listener exists. The listener
    // would mistake a real connection for its peer.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    match rustix::net::connect(&probe, &address) {
        Err(Errno::CONNREFUSED) => Ok(true),
        Ok(()) | Err(Errno::PROTOTYPE | Errno::AGAIN) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

impl Channel {
    /// Connects to `address` within `limit`, trying all addresses of a host name. `fd:N` duplicates the descriptor.
    ///
    /// # Errors
    /// [`TransportError::Connect`], [`TransportError::TimedOut`], [`TransportError::Cancelled`].
    pub fn connect(
        address: &Address,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Channel, TransportError> {
        connect(address, limit, cancel)
    }

    /// Connects as [`Channel::connect`], then starts TLS if `tls` is given.
    ///
    /// The server's certificate must bear the host of the address, unless the settings name another. `adopt` gets the
    /// channel before the handshake, so that it can set the channel up and let another thread shut it down.
    ///
    /// # Errors
    /// As [`Channel::connect`] and [`Channel::start_tls`].
    pub fn connect_with(
        address: &Address,
        tls: Option<&Tls>,
        limit: Duration,
        cancel: &CancelFlag,
        adopt: impl FnOnce(Channel) -> Arc<Channel>,
    ) -> Result<Arc<Channel>, TransportError> {
        let began = Instant::now();
        let channel = adopt(Self::connect(address, limit, cancel)?);
        if let Some(tls) = tls {
            let left = limit.saturating_sub(began.elapsed());
            channel.start_tls(tls, TlsEndpoint::Client, address.host(), left, cancel)?;
        }
        Ok(channel)
    }
}

fn connect(address: &Address, limit: Duration, cancel: &CancelFlag) -> Result<Channel, TransportError> {
    let attempt = Attempt { address, limit, deadline: Instant::now().checked_add(limit), cancel };
    if let Address::Handed(fd) = address {
        // Taken even if it is too late, so that it is closed: it has no other owner.
        let socket = handed::take(fd).map_err(|error| attempt.failed(error))?;
        attempt.check()?;
        let peer = name_of(address, socket.as_fd());
        return Channel::adopt(socket, peer);
    }
    attempt.check()?;
    match address {
        Address::Fd(name) => {
            let socket = handed::duplicate(name).map_err(|error| attempt.failed(error))?;
            Channel::adopt(socket, address.to_string())
        }
        Address::Tcp { host, port } => {
            let (socket, peer) = attempt.tcp(host, *port)?;
            Channel::adopt(socket, format!("tcp:{peer}"))
        }
        Address::Unix(path) => Channel::adopt(attempt.unix(path)?, address.to_string()),
        // Other addresses have no sockets, or were taken above.
        _ => Err(attempt.failed(io::ErrorKind::Unsupported.into())),
    }
}

/// The IP addresses of a host, for listening or connecting.
///
/// A separate thread looks up names, because the resolver has no time limit and cannot be cancelled. If the answer
/// arrives too late, the thread discards it and ends.
///
/// # Errors
/// `TimedOut` after the deadline and `Interrupted` after a cancel, both without an OS error number; errors of the
/// resolver; [`HookPanicked`] as the cause of an error of the kind `Other`.
pub fn resolve(
    host: &str,
    port: u16,
    deadline: Option<Instant>,
    cancel: &CancelFlag,
) -> io::Result<Vec<SocketAddr>> {
    if let Ok(number) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(number, port)]);
    }
    let (answer, answered) = mpsc::channel();
    let name = host.to_owned();
    let thread = NewThread::from(ThreadRole::Resolve).spawn(move || {
        let _ = answer.send((name.as_str(), port).to_socket_addrs().map(Vec::from_iter));
    })?;
    loop {
        let slice = Duration::from_millis(20);
        match answered.recv_timeout(slice) {
            Ok(addresses) => return addresses,
            Err(RecvTimeoutError::Disconnected) => return Err(panicked(thread)),
            Err(RecvTimeoutError::Timeout) if cancel.is_cancelled() => {
                return Err(io::ErrorKind::Interrupted.into());
            }
            Err(RecvTimeoutError::Timeout) => {
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
        }
    }
}

/// The reason why a resolving thread ended without an answer.
fn panicked(thread: JoinHandle<()>) -> io::Error {
    match thread.join().map_err(|panic| panic.downcast::<HookPanicked>()) {
        Err(Ok(panic)) => io::Error::other(*panic),
        _ => io::ErrorKind::BrokenPipe.into(),
    }
}

struct Attempt<'a> {
    address: &'a Address,
    limit: Duration,
    deadline: Option<Instant>,
    cancel: &'a CancelFlag,
}

/// Selects the simplest congestion control for a loopback connection, where no network can be congested.
///
/// A default that paces (bbr) costs a quarter of the speed and of the CPU time there. The option must be set before
/// the connection is established. Other connections keep the system's choice.
fn spare_pacing(socket: &OwnedFd) {
    // Every Linux has reno and allows it for all users. If it is refused, the default works too.
    let _ = sockopt::set_tcp_congestion(socket, "reno");
}

impl Attempt<'_> {
    fn tcp(&self, host: &str, port: u16) -> Result<(OwnedFd, SocketAddr), TransportError> {
        let host = if host.is_empty() { "localhost" } else { host };
        let addresses =
            resolve(host, port, self.deadline, self.cancel).map_err(|error| self.failed(error))?;
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
        for address in addresses {
            let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
            let connect = |socket: &OwnedFd| {
                if address.ip().is_loopback() {
                    spare_pacing(socket);
                }
                // Set before connecting, because the packets of the TCP handshake are retransmitted too.
                socket::retransmit_often(socket.as_fd());
                rustix::net::connect(socket, &address)
            };
            match self.socket(family, connect) {
                Ok(socket) => return Ok((socket, address)),
                Err(error) => last = error,
            }
            self.check()?;
        }
        Err(self.failed(last))
    }

    fn unix(&self, path: &Path) -> Result<OwnedFd, TransportError> {
        let socket = UnixPath::new(path).and_then(|path| {
            let address = SocketAddrUnix::new(path.as_path())?;
            self.socket(AddressFamily::UNIX, |socket| rustix::net::connect(socket, &address))
        });
        socket.map_err(|error| self.failed(error))
    }

    /// A connected socket. `failed` later distinguishes an interruption with the flag set from a time-out.
    fn socket(
        &self,
        family: AddressFamily,
        connect: impl Fn(&OwnedFd) -> rustix::io::Result<()>,
    ) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        loop {
            match connect(&socket) {
                Ok(()) => return Ok(socket),
                Err(Errno::INPROGRESS | Errno::INTR) => break,
                // A Unix listener's queue is full, and `poll` cannot wait for room in it.
                Err(Errno::AGAIN) => {
                    std::thread::sleep(QUEUE_STEP);
                    if self.cancel.is_cancelled() {
                        return Err(io::ErrorKind::Interrupted.into());
                    }
                    if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        return Err(io::Error::new(
                            io::ErrorKind::TimedOut,
                            format!(
                                "its queue of connections has been full for {:?}: the process that listens there \
                                 accepts no connections",
                                self.limit
                            ),
                        ));
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        match wait(socket.as_fd(), PollFlags::OUT, &[self.cancel], self.deadline)? {
            Waited::Ready => {}
            Waited::Cancelled => return Err(io::ErrorKind::Interrupted.into()),
            Waited::TimedOut => return Err(io::ErrorKind::TimedOut.into()),
        }
        sockopt::socket_error(&socket)??;
        Ok(socket)
    }

    fn check(&self) -> Result<(), TransportError> {
        if self.cancel.is_cancelled() {
            return Err(TransportError::Cancelled { channel: self.address.to_string() });
        }
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(self.timed_out());
        }
        Ok(())
    }

    fn failed(&self, source: io::Error) -> TransportError {
        // Errors of the kernel have a number; those of this file (limit passed) have none.
        if self.cancel.is_cancelled() {
            TransportError::Cancelled { channel: self.address.to_string() }
        } else if source.kind() == io::ErrorKind::TimedOut
            && source.raw_os_error().is_none()
            && source.get_ref().is_none()
        {
            self.timed_out()
        } else {
            TransportError::Connect { address: self.address.to_string(), source }
        }
    }

    fn timed_out(&self) -> TransportError {
        TransportError::TimedOut {
            what: "connecting to",
            address: self.address.to_string(),
            after: self.limit,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spare_pacing_takes_reno() {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();

        spare_pacing(&socket);

        assert_eq!(sockopt::tcp_congestion(&socket).unwrap(), "reno");
    }
}
