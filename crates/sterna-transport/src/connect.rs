//! Connecting, with a limit and cancellable.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use crate::cancel::{Waited, wait};
use crate::{Address, CancelFlag, Channel, TransportError, handed};

pub(crate) fn connect(
    address: &Address,
    limit: Duration,
    cancel: &CancelFlag,
) -> Result<Channel, TransportError> {
    let attempt = Attempt { address, limit, deadline: Instant::now().checked_add(limit), cancel };
    if let Address::Handed(fd) = address {
        // Taken even if it is too late, so that it is closed: nobody else owns it.
        let socket = handed::take(fd).map_err(|error| attempt.failed(error))?;
        attempt.check()?;
        return Channel::adopt(socket, address.to_string());
    }
    attempt.check()?;
    match address {
        Address::Fd(name) => {
            let socket = handed::duplicate(name).map_err(|error| attempt.failed(error))?;
            Channel::adopt(socket, address.to_string())
        }
        Address::Tcp { host, port } => attempt.tcp(host, *port),
        Address::Unix(path) => attempt.unix(path),
        Address::Handed(_) | Address::File { .. } | Address::Rdma { .. } => {
            Err(attempt.failed(io::ErrorKind::Unsupported.into()))
        }
    }
}

/// Numbers of a host for listening or connecting. Names are looked up on a thread of its own, as the
/// resolver can neither be limited nor cancelled; a thread whose answer comes too late just ends.
///
/// # Errors
/// `TimedOut` after the deadline and `Interrupted` after a cancel, both without a number of the system; what the resolver
/// says.
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
    std::thread::Builder::new().name("resolve".into()).spawn(move || {
        let _ = answer.send((name.as_str(), port).to_socket_addrs().map(Vec::from_iter));
    })?;
    loop {
        let slice = Duration::from_millis(20);
        match answered.recv_timeout(slice) {
            Ok(addresses) => return addresses,
            Err(RecvTimeoutError::Disconnected) => return Err(io::ErrorKind::BrokenPipe.into()),
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

struct Attempt<'a> {
    address: &'a Address,
    limit: Duration,
    deadline: Option<Instant>,
    cancel: &'a CancelFlag,
}

/// Takes the plainest congestion control for a connection within this machine, where no network can be
/// congested: a default that paces itself (bbr) costs a quarter of the speed and of the CPU time there. Has
/// to be done before the connection is made; elsewhere the system's choice stands.
fn spare_pacing(socket: &OwnedFd) {
    // Every Linux has it and lets anyone use it; where not, the default does.
    let _ = sockopt::set_tcp_congestion(socket, "reno");
}

impl Attempt<'_> {
    fn tcp(&self, host: &str, port: u16) -> Result<Channel, TransportError> {
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
                rustix::net::connect(socket, &address)
            };
            match self.socket(family, connect) {
                Ok(socket) => return Channel::adopt(socket, format!("tcp:{address}")),
                Err(error) => last = error,
            }
            self.check()?;
        }
        Err(self.failed(last))
    }

    fn unix(&self, path: &Path) -> Result<Channel, TransportError> {
        let socket = SocketAddrUnix::new(path).map_err(io::Error::from).and_then(|address| {
            self.socket(AddressFamily::UNIX, |socket| rustix::net::connect(socket, &address))
        });
        Channel::adopt(socket.map_err(|error| self.failed(error))?, self.address.to_string())
    }

    /// A connected socket. Interrupted, with the flag set, and timed out are told apart by `failed`.
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
                // A Unix listener's queue is full; there is nothing to poll for.
                Err(Errno::AGAIN) => {
                    std::thread::sleep(Duration::from_millis(5));
                    if self.cancel.is_cancelled() {
                        return Err(io::ErrorKind::Interrupted.into());
                    }
                    if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        return Err(io::ErrorKind::TimedOut.into());
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
        // Errors of the kernel carry a number; ours (limit passed) do not.
        if self.cancel.is_cancelled() {
            TransportError::Cancelled { channel: self.address.to_string() }
        } else if source.kind() == io::ErrorKind::TimedOut && source.raw_os_error().is_none() {
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
