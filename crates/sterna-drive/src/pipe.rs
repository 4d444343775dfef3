//! A pipe between a VM and this program.

use std::os::fd::OwnedFd;

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
