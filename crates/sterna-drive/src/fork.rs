//! Copies a running guest into a second VM: the first one is paused for milliseconds, and continues.
//!
//! The second VM gets the stream of a live save as if a guest migrated to it. Both guests have the same memory, the same names
//! and the same secrets afterwards. This module knows nothing about their disks and network cards.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::restore::launch::Launched;
use super::save::end_migration;
use super::{DriveError, Vm, Watch, Wish, watch};

/// How long the copy may take to load its devices after the last page.
const LOAD_LIMIT: Duration = Duration::from_secs(60);

/// The result of a fork.
#[derive(Debug, Clone, Copy)]
pub struct Forked {
    /// How long the first guest was paused.
    pub pause: Duration,
    /// Whether the copy runs.
    pub is_running: bool,
    /// Size of the guest's RAM, in bytes.
    pub ram_bytes: u64,
    /// Time from the command until the copy has everything.
    pub total: Duration,
}

/// Copies the guest of `source`, a Sterna VM, into `copy`, which waits for a guest. The socket is made in `directory`.
///
/// # Errors
/// [`DriveError`]: the first guest runs as before. The copy has no guest.
pub fn fork(
    source: &mut Vm,
    launched: &mut Launched,
    directory: &Path,
    watcher: &mut dyn Watch,
) -> Result<Forked, DriveError> {
    if !source.is_sterna() {
        return Err(DriveError::Unfit(format!(
            "{} is no Sterna VM: only such a VM can be forked",
            source.at()
        )));
    }
    let mut copy = launched.vm(watcher)?;
    let began = Instant::now();
    let uri = format!("unix:{}", directory.join("fork").display());
    copy.execute("migrate-incoming", json!({ "uri": uri }))?;
    source.execute("x-sterna-live-save", json!({ "uri": uri }))?;
    let trace = match watch(source, watcher, Duration::MAX) {
        Ok(trace) => trace,
        Err(error) => {
            let _ = end_migration(source, Instant::now() + LOAD_LIMIT);
            return Err(error);
        }
    };
    let told = source.execute("x-sterna-query-live-save", Value::Null)?;
    let sent = trace.last();
    if trace.was_cancelled || sent.status == "cancelled" {
        return Err(DriveError::Cancelled("cancelled; the guest runs, and there is no copy".into()));
    }
    // A source that failed may have sent nothing, and then the copy waits for its first byte.
    let loaded = match sent.status == "completed" {
        true => await_load(&mut copy, watcher)?,
        false => copy.progress()?.status,
    };
    if sent.status != "completed" || loaded != "completed" {
        // The copy knows best why it has not taken the guest.
        let theirs = copy.progress().ok().and_then(|progress| progress.error);
        let reason =
            theirs.or_else(|| sent.error.clone()).unwrap_or_else(|| format!("the copy is `{loaded}`"));
        return Err(DriveError::Failed(format!(
            "there is no copy: {reason}{}; the guest runs as before",
            launched.said()
        )));
    }
    Ok(Forked {
        pause: Duration::from_micros(told["pause"].as_u64().unwrap_or(0)),
        is_running: copy.run_state()? == "running",
        ram_bytes: sent.total_bytes,
        total: began.elapsed(),
    })
}

/// Waits until the copy has loaded its guest, or has failed. Returns its status.
fn await_load(copy: &mut Vm, watcher: &mut dyn Watch) -> Result<String, DriveError> {
    let deadline = Instant::now() + LOAD_LIMIT;
    loop {
        let progress = copy.progress()?;
        if progress.is_over() && progress.status != "none" {
            return Ok(progress.status);
        }
        if Instant::now() > deadline {
            return Ok(progress.status);
        }
        if watcher.wish() != Wish::Continue {
            return Err(DriveError::Cancelled("cancelled; the guest runs, and the copy was ended".into()));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
