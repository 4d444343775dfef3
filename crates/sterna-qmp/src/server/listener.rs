//! The listening socket: binds, accepts, and at the end removes all threads, descriptors and files.

use std::fs;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::bus::{EventBus, Outbox};
use super::endpoint::Endpoint;
use super::handler::Handler;
use super::limits::MAX_CLIENTS;
use super::session::{BUILTIN_COMMANDS, Session};
use super::spec::CommandSpec;
use sterna_transport::UnixPath;

/// The reason why a server could not start. All reasons are local.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// Another program listens on the socket.
    #[error("{0}: another program listens there; stop it or choose another path")]
    InUse(Endpoint),
    /// The path exists and is not a socket.
    #[error("{0}: the path exists and is not a socket; remove it or choose another")]
    NotASocket(Endpoint),
    /// The address is not on loopback. A monitor has full control of the VM and needs no password.
    #[error("{0}: a monitor listens only on loopback or a Unix socket, because it has no authentication")]
    NotLoopback(Endpoint),
    /// The operating system refused.
    #[error("{endpoint}: {error}")]
    Io {
        /// The address at which it should listen.
        endpoint: Endpoint,
        /// The reason from the operating system.
        error: io::Error,
    },
}

/// A listening QMP server; see the module's description.
pub struct Server {
    endpoint: Endpoint,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
    file: Option<SocketFile>,
}

struct Shared {
    handler: Arc<dyn Handler>,
    commands: Arc<Vec<CommandSpec>>,
    bus: EventBus,
    clients: Mutex<Vec<(JoinHandle<()>, Arc<Outbox>)>>,
    stop: AtomicBool,
    wake: OwnedFd,
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Server {
    /// Listens at `endpoint` and serves until it is closed. A socket file without a listener is replaced.
    pub fn bind(endpoint: &Endpoint, handler: Arc<dyn Handler>, bus: EventBus) -> Result<Self, ServerError> {
        let io_error = |error: io::Error| ServerError::Io { endpoint: endpoint.clone(), error };
        let (listener, endpoint, file) = match endpoint {
            Endpoint::Unix(path) => {
                remove_stale(path, endpoint)?;
                let short = UnixPath::new(path).map_err(io_error)?;
                let listener = UnixListener::bind(short.as_path()).map_err(io_error)?;
                (Listener::Unix(listener), endpoint.clone(), Some(SocketFile::of(path).map_err(io_error)?))
            }
            Endpoint::Tcp(address) if !address.ip().is_loopback() => {
                return Err(ServerError::NotLoopback(endpoint.clone()));
            }
            Endpoint::Tcp(address) => {
                let listener = TcpListener::bind(address).map_err(io_error)?;
                let bound = Endpoint::Tcp(listener.local_addr().map_err(io_error)?);
                (Listener::Tcp(listener), bound, None)
            }
        };
        listener.set_nonblocking().map_err(io_error)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| io_error(error.into()))?;
        let mut commands = BUILTIN_COMMANDS.to_vec();
        commands.extend(handler.commands());
        let shared = Arc::new(Shared {
            handler,
            commands: Arc::new(commands),
            bus,
            clients: Mutex::default(),
            stop: AtomicBool::new(false),
            wake,
        });
        let accepting = shared.clone();
        let acceptor = thread::Builder::new()
            .name("qmp".into())
            .spawn(move || accept_all(&listener, &accepting))
            .map_err(io_error)?;
        Ok(Self { endpoint, shared, acceptor: Some(acceptor), file })
    }

    /// The address of the server, with the system's choice if port 0 was requested.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Ends all connections and threads, and removes the socket file.
    pub fn close(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(acceptor) = self.acceptor.take() else { return };
        self.shared.stop.store(true, Ordering::Release);
        self.shared.ring();
        // The panic hook has reported a panic of this thread. Closing continues.
        let _ = acceptor.join();
        self.file.take();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn ring(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Joins the threads of disconnected clients.
    fn reap(&self) {
        let mut clients = self.clients.lock();
        let mut at = 0;
        while at < clients.len() {
            if clients[at].0.is_finished() {
                let _ = clients.swap_remove(at).0.join();
            } else {
                at += 1;
            }
        }
    }

    fn welcome(self: &Arc<Self>, socket: OwnedFd) {
        self.reap();
        let mut clients = self.clients.lock();
        if clients.len() >= MAX_CLIENTS {
            return;
        }
        let Ok(outbox) = Outbox::new().map(Arc::new) else { return };
        let session = Session::new(socket, outbox.clone(), self.handler.clone(), self.commands.clone());
        let shared = self.clone();
        let serve = move || {
            session.run(&shared.bus);
            shared.ring();
        };
        // If no thread can be started, the socket is dropped, so the client sees its connection closed.
        if let Ok(thread) = thread::Builder::new().name("qmp-client".into()).spawn(serve) {
            clients.push((thread, outbox));
        }
    }
}

fn accept_all(listener: &Listener, shared: &Arc<Shared>) {
    while !shared.stop.load(Ordering::Acquire) {
        let mut fds = [
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(shared.wake.as_fd(), PollFlags::IN),
        ];
        let _ = poll(&mut fds, None);
        let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
        shared.reap();
        match listener.accept() {
            Ok(socket) => shared.welcome(socket),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // Usually no descriptors are left. The connection stays in the backlog, so sleep instead of spinning.
            Err(_) => thread::sleep(std::time::Duration::from_millis(20)),
        }
    }
    let clients = std::mem::take(&mut *shared.clients.lock());
    clients.iter().for_each(|(_, outbox)| outbox.close());
    for (thread, _) in clients {
        let _ = thread.join();
    }
}

impl Listener {
    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Unix(listener) => listener.set_nonblocking(true),
            Self::Tcp(listener) => listener.set_nonblocking(true),
        }
    }

    fn accept(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Unix(listener) => Ok(listener.accept()?.0.into()),
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                let _ = stream.set_nodelay(true);
                Ok(stream.into())
            }
        }
    }

    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// The server's socket file. Dropping this removes the file if it is still the same one.
struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        let found = fs::symlink_metadata(path)?;
        Ok(Self { path: path.to_owned(), identity: (found.dev(), found.ino()) })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Ok(found) = fs::symlink_metadata(&self.path)
            && (found.dev(), found.ino()) == self.identity
        {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn remove_stale(path: &Path, endpoint: &Endpoint) -> Result<(), ServerError> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(ServerError::Io { endpoint: endpoint.clone(), error }),
    };
    if !found.file_type().is_socket() {
        return Err(ServerError::NotASocket(endpoint.clone()));
    }
    let failed = |error| ServerError::Io { endpoint: endpoint.clone(), error };
    match sterna_transport::is_abandoned(path).map_err(failed)? {
        true => fs::remove_file(path).map_err(failed),
        false => Err(ServerError::InUse(endpoint.clone())),
    }
}
