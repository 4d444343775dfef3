//! A pipe between a VM and this program.

use std::os::fd::OwnedFd;

use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use super::error::DriveError;

/// What it holds, where the system allows so much.
const PIPE_BYTES: usize = 1 << 20;

/// Its ends: to read from, to write to.
pub(super) fn pipe() -> Result<(OwnedFd, OwnedFd), DriveError> {
    let ends = pipe_with(PipeFlags::CLOEXEC)
        .map_err(|error| DriveError::Failed(format!("cannot make a pipe: {error}")))?;
    // Only speed depends on it.
    let _ = fcntl_setpipe_size(&ends.0, PIPE_BYTES);
    Ok(ends)
}
