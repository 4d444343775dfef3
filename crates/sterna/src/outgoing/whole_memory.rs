//! Waits until a guest that was restored before its memory was loaded has all of its memory.
//!
//! A thread that touches a missing page waits in the kernel. Neither a cancel nor an image that cannot be read ends that wait,
//! and the read of a damaged page stops the guest. Memory with missing pages cannot be write-protected, either. Therefore the
//! server of the pages places all of them before an operation that reads all memory touches the first one. It works without
//! pauses meanwhile, and the guest runs.

use std::time::Duration;

use sterna_ram::GuestRam;

use crate::error::MigrationError;

/// Interval between two calls of `check`.
const LOOK: Duration = Duration::from_millis(20);

/// Waits until no page of `ram` is missing. `check` returns an error to give up.
///
/// # Errors
/// [`MigrationError::NotLoaded`], and the errors of `check`. The server has its speed from before then.
pub(super) fn await_whole(
    ram: &GuestRam,
    mut check: impl FnMut() -> Result<(), MigrationError>,
) -> Result<(), MigrationError> {
    let Some(completing) = ram.complete() else { return Ok(()) };
    tracing::info!(missing_bytes = ram.missing_bytes(), "the rest of the guest's memory is loaded first");
    loop {
        check()?;
        if completing.wait(LOOK).map_err(MigrationError::NotLoaded)? {
            return Ok(());
        }
    }
}
