//! Connects to a device's process within a time limit. A blocking connect could wait without a limit while
//! the listener's queue is full. A non-blocking one fails with EAGAIN and is repeated here.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Time for which a socket may refuse connections. A server that starts binds first and listens later.
const GRACE: Duration = Duration::from_secs(1);
/// Interval between two attempts.
const STEP: Duration = Duration::from_millis(10);

/// Connects to the socket at `path` and returns a blocking stream.
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
