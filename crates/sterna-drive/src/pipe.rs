//! A pipe or a pair of sockets between a VM and this program.

use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use super::error::DriveError;

/// Requested capacity of the pipe. The system may grant less.
const PIPE_BYTES: usize = 1 << 20;

/// Creates a pipe: (read end, write end).
pub(super) fn pipe() -> Result<(OwnedFd, OwnedFd), DriveError> {
    let ends = pipe_with(PipeFlags::CLOEXEC)
        .map_err(|error| DriveError::Failed(format!("cannot create a pipe: {error}")))?;
    // A smaller pipe only costs speed.
    let _ = fcntl_setpipe_size(&ends.0, PIPE_BYTES);
    Ok(ends)
}

/// Creates a pair of connected sockets. Sterna's own VMM loads from a socket, not from a pipe.
pub(super) fn sockets() -> Result<(OwnedFd, OwnedFd), DriveError> {
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(|error| DriveError::Failed(format!("cannot create a pair of sockets: {error}")))
}
