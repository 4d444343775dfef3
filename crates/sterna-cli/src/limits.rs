//! Turns resource limits that would kill this process into errors, so that a command can undo its changes.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::process::{Resource, getrlimit};
use signal_hook::consts::SIGXFSZ;
use sterna_transport::PageFile;

use crate::exit::Stop;
use crate::units;

/// Commands with images and with monitors need less than 32 MiB, and 2 MiB per thread. A failed allocation
/// aborts a Rust program.
const LEAST_DATA_BYTES: u64 = 64 << 20;
/// Code and reserved addresses take more than half of this.
const LEAST_ADDRESS_BYTES: u64 = 128 << 20;

/// Refuses limits that are too low for any command. Makes a write beyond the file size limit fail with EFBIG.
///
/// # Errors
/// A memory limit is too low. Nothing was done.
pub fn prepare() -> Result<(), Stop> {
    // A handler, because child processes would inherit SIG_IGN. If it cannot be set, the signal's default
    // stays.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
    check(getrlimit(Resource::Data).current, "data", "ulimit -d, LimitDATA=", LEAST_DATA_BYTES)?;
    check(getrlimit(Resource::As).current, "address space", "ulimit -v, LimitAS=", LEAST_ADDRESS_BYTES)
}

/// If the process aborts after a failed allocation, removes the image's staging file and prints an error.
/// Not for a VM, whose core dump contains more information.
pub fn clean_up_on_abort() {
    PageFile::remove_staging_files_on_abort(
        "sterna: error: this process could not allocate memory (the text above has the size), or it has a defect: \
         raise its limits (ulimit -v, ulimit -d, MemoryMax=), or report that text. No partial output is left. The VM \
         may still have settings of this command\n",
    );
}

fn check(limit: Option<u64>, what: &str, setting: &str, least: u64) -> Result<(), Stop> {
    match limit {
        Some(limit) if limit < least => Err(Stop::failed(format!(
            "this process is limited to {} of {what}, but sterna needs at least {}: raise the limit ({setting}); \
             nothing was done",
            units::bytes(limit),
            units::bytes(least)
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_that_is_too_low_is_refused_with_both_numbers_and_its_name() {
        let refused = check(Some(32 << 20), "data", "ulimit -d", 64 << 20).unwrap_err().message;

        for word in ["32.0 MiB of data", "64.0 MiB", "ulimit -d", "nothing was done"] {
            assert!(refused.contains(word), "{refused}");
        }
        assert!(check(Some(64 << 20), "data", "ulimit -d", 64 << 20).is_ok());
        assert!(check(None, "data", "ulimit -d", 64 << 20).is_ok());
    }
}
