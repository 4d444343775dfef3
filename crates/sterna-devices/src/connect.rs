//! Connecting to a device's process within a limit. A Unix socket refuses while its queue is full instead of letting
//! one wait, if one asks it not to block.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// How long a socket may refuse: one that starts binds first and listens then.
const GRACE: Duration = Duration::from_secs(1);
/// How often a socket that nobody accepts at is tried.
const STEP: Duration = Duration::from_millis(10);

/// A connected, blocking socket.
pub(crate) fn within(limit: Duration, path: &Path) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let begin = Instant::now();
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&socket, &address) {
            Ok(()) => {
                let socket = UnixStream::from(socket);
                socket.set_nonblocking(false)?;
                return Ok(socket);
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) if begin.elapsed() < limit => {
                thread::sleep(STEP);
            }
            Err(rustix::io::Errno::CONNREFUSED) if begin.elapsed() < limit.min(GRACE) => thread::sleep(STEP),
            Err(rustix::io::Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error.into()),
        }
    }
}
