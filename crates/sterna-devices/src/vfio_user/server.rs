//! The device's side of vfio-user. It serves one client after the other with the answers of a [`Backend`].
//!
//! A malformed payload is answered with EINVAL, and the connection continues, because the position of the
//! next message is known. A malformed header ends the connection. When a client disconnects, its guest RAM is
//! unmapped and logging stops. The device's state does not change.

mod dispatch;
mod end;

use std::fmt;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::backend::Backend;
use dispatch::Session;
pub use end::ServerEnd;

/// A listening socket of a device.
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
    backend: Arc<dyn Backend>,
    stop: UnixStream,
    stopper: Stopper,
}

/// A handle that ends a server from another thread.
#[derive(Debug, Clone)]
pub struct Stopper {
    /// Shutting it down wakes the thread that waits for a client.
    stop: Arc<UnixStream>,
    current: Arc<Mutex<Current>>,
}

#[derive(Debug, Default)]
struct Current {
    stopped: bool,
    connection: Option<UnixStream>,
}

impl Server {
    /// Listens at `path`. An abandoned socket file is replaced.
    ///
    /// # Errors
    /// Another server listens there, or the system refuses.
    pub fn bind(path: &Path, backend: Arc<dyn Backend>) -> io::Result<Self> {
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_abandoned(path) => {
                std::fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            other => other?,
        };
        listener.set_nonblocking(true)?;
        let (stop, other) = UnixStream::pair()?;
        let stopper = Stopper { stop: Arc::new(other), current: Arc::default() };
        Ok(Self { listener, path: path.to_owned(), backend, stop, stopper })
    }

    /// The handle that ends this server.
    pub fn stopper(&self) -> Stopper {
        self.stopper.clone()
    }

    /// Waits for a client and serves it until it disconnects. `None` after the server was stopped.
    ///
    /// # Errors
    /// The system cannot wait for a client.
    pub fn serve_next(&self) -> io::Result<Option<ServerEnd>> {
        loop {
            let mut fds =
                [PollFd::new(&self.listener, PollFlags::IN), PollFd::new(&self.stop, PollFlags::IN)];
            match poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => continue,
                other => other?,
            };
            let (stream, _) = match self.listener.accept() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.stopper.current.lock().stopped {
                        return Ok(None);
                    }
                    continue;
                }
                other => other?,
            };
            {
                let mut current = self.stopper.current.lock();
                if current.stopped {
                    return Ok(None);
                }
                current.connection = Some(stream.try_clone()?);
            }
            let end = serve(stream, self.backend.as_ref());
            self.stopper.current.lock().connection = None;
            return Ok(Some(end));
        }
    }

    /// Serves clients on a thread until the handle is dropped.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn spawn(self) -> io::Result<ServerThread> {
        let stopper = self.stopper();
        let path = self.path.clone();
        let work = move || {
            loop {
                match self.serve_next() {
                    Ok(Some(ServerEnd::Disconnected | ServerEnd::HungUp)) => {}
                    Ok(Some(end)) => tracing::warn!(?end, "a vfio-user client was refused"),
                    Ok(None) => return,
                    Err(error) => {
                        tracing::error!(%error, "cannot wait for vfio-user clients");
                        return;
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("vfio-user".into()).spawn(work)?;
        Ok(ServerThread { stopper, path, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails if the file is already removed, with the same effect.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Stopper {
    /// Closes the present connection and accepts no further ones.
    pub fn stop(&self) {
        let mut current = self.current.lock();
        current.stopped = true;
        if let Some(connection) = &current.connection {
            // Fails if the client has already disconnected, with the same effect.
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
        let _ = self.stop.shutdown(std::net::Shutdown::Both);
    }
}

/// A server on its own thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct ServerThread {
    stopper: Stopper,
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl ServerThread {
    /// Path of the server's socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        self.stopper.stop();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of a vfio-user server panicked");
        }
    }
}

/// Serves one client on `stream` until the connection ends.
pub fn serve(stream: UnixStream, backend: &dyn Backend) -> ServerEnd {
    let end = Session::new(stream, backend).run();
    backend.stop_logging();
    backend.dma_unmap_all();
    end
}

/// Whether no server listens on the socket at `path`. A datagram socket detects this without a connection,
/// and without waiting for room in the listener's queue.
fn is_abandoned(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None);
    probe.is_ok_and(|probe| {
        SocketAddrUnix::new(path).is_ok_and(|address| connect(&probe, &address) == Err(Errno::CONNREFUSED))
    })
}
