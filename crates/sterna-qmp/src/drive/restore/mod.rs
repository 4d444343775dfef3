//! Restoring a guest from an image into a VM that waits for one (`-incoming defer`).
//!
//! # The way of a restore
//! The image is examined before the VM sees it ([`Subject`]): QEMU 11.1 crashes on a truncated mapped-ram image
//! when it loads with multifd, and loads others into the wrong machine without a word (specs/mapped-ram.md §6).
//! Machine type, block names and sizes are compared with the machine's. Then QEMU loads mapped-ram itself, from
//! descriptors that are passed to it; streams, compressed or not, are fed to it through a pipe, checked on the way.
//!
//! # What becomes of the guest
//! It starts if it ran when it was saved, unless the operator says otherwise. After a failure a QEMU ends, as it
//! would by itself: its RAM is half loaded, and nothing can be loaded into it any more.

mod cached;
mod examine;
pub mod launch;
pub mod lazy;
mod loaded;
mod request;
mod setup;

use std::time::{Duration, Instant};

use serde_json::Value;

pub use examine::Subject;
use loaded::Feed;
pub use request::{RestoreRequest, Start};

use super::{DriveError, Progress, Settings, Vm, Watch, Wish};
use crate::client::ClientError;

/// Between two looks when no event comes.
const LOOK: Duration = Duration::from_millis(100);
const BLINK: Duration = Duration::from_millis(20);

/// A good restore.
#[derive(Debug, Clone)]
pub struct Restored {
    /// The image's kind, such as `libvirt-sparse`.
    pub kind: String,
    /// Bytes of RAM blocks in the image.
    pub ram_bytes: u64,
    /// Whether the guest runs now.
    pub is_running: bool,
    /// Whether it was to run, by its image or the request.
    pub should_run: bool,
    /// Whether pages went past the page cache.
    pub is_direct: bool,
    /// Threads that read pages.
    pub channels: u32,
    /// From the command to a guest that can run.
    pub total: Duration,
    /// Of that, examining the image.
    pub examining: Duration,
    /// What is worth knowing, each a sentence.
    pub warnings: Vec<String>,
}

/// Restores the image into `vm`.
///
/// # Errors
/// See [`DriveError`]. [`DriveError::Unfit`]: the VM has seen nothing and still waits.
pub fn restore(
    vm: &mut Vm,
    request: &RestoreRequest,
    watcher: &mut dyn Watch,
) -> Result<Restored, DriveError> {
    let began = Instant::now();
    let subject = Subject::examine(&request.path)?;
    let examining = began.elapsed();
    let settings = Settings::read(vm)?;
    setup::check(vm, &settings, request)?;
    let mut warnings = subject.compare(vm)?;
    let mut feed = Feed::begin(vm, &settings, &subject, request)?;
    let changed = match setup::change(vm, &settings, &subject, request, feed.is_direct_in_vm()) {
        Ok(changed) => changed,
        Err(error) => {
            feed.clean(vm);
            return Err(error);
        }
    };
    let wants_to_run = match request.start {
        Start::AsItWas => subject.was_running(),
        Start::Paused => Some(false),
        Start::Running => Some(true),
    };
    // Of a compressed image the last byte has not been seen: its guest starts when it has, by our word. Only what a bare
    // stream says of itself is not known here, and the VM goes by it.
    let is_held = wants_to_run == Some(false) || wants_to_run == Some(true) && !subject.is_whole();
    if let Err(error) = begin(vm, &feed, is_held) {
        feed.clean(vm);
        // What must be heard is why it does not begin.
        let _ = changed.undo(vm);
        return Err(error);
    }
    if let Err(error) = load(vm, &mut feed, watcher) {
        return Err(end(vm, error, &feed));
    }
    // The guest is there and may run: from here on nothing is an error that would end it.
    feed.clean(vm);
    warnings.extend(feed.damage().iter().map(|finding| format!("the image is damaged: {finding}")));
    if wants_to_run == Some(true)
        && let Err(error) = run(vm)
    {
        warnings.push(format!("the guest is loaded but does not run: {error}; `cont` starts it"));
    }
    let total = began.elapsed();
    if let Err(error) = changed.undo(vm) {
        warnings.push(format!("the VM's settings could not be restored: {error}"));
    }
    let is_running = vm.run_state().map(|state| state == "running").unwrap_or_else(|error| {
        warnings.push(format!("it is unknown whether the guest runs: {error}"));
        false
    });
    Ok(Restored {
        kind: subject.kind().name(),
        ram_bytes: subject.shape().ram_bytes(),
        is_running,
        should_run: wants_to_run == Some(true),
        is_direct: feed.is_direct(),
        channels: setup::channels(&subject, request),
        total,
        examining,
        warnings,
    })
}

/// Tells the VM to load. `is_held`: its guest must not start by itself.
fn begin(vm: &mut Vm, feed: &Feed, is_held: bool) -> Result<(), DriveError> {
    if is_held {
        // While it waits, this only says so.
        vm.execute("stop", Value::Null)?;
    }
    let Err(error) = vm.migrate_incoming(&feed.uri()) else { return Ok(()) };
    if is_held && !error.is_disconnect() {
        let _ = vm.execute("cont", Value::Null);
    }
    Err(match error {
        DriveError::Monitor { error: ClientError::Refused { .. }, .. } => {
            DriveError::Unfit(format!("{error}; nothing was loaded, and the VM still waits for a guest"))
        }
        error => error,
    })
}

fn run(vm: &mut Vm) -> Result<(), DriveError> {
    if vm.run_state()? != "running" {
        vm.execute("cont", Value::Null)?;
    }
    Ok(())
}

/// From `migrate-incoming` to the last device.
fn load(vm: &mut Vm, feed: &mut Feed, watcher: &mut dyn Watch) -> Result<(), DriveError> {
    loop {
        let progress = match vm.progress() {
            // QEMU may answer nobody while it loads.
            Err(DriveError::Monitor { error: ClientError::TimedOut { .. }, .. }) => Progress::default(),
            other => other?,
        };
        match progress.status.as_str() {
            "completed" => return feed.finish(),
            "failed" => {
                let reason = feed.failure().or(progress.error);
                let reason = reason.unwrap_or_else(|| "no reason was given".into());
                return Err(DriveError::Failed(format!("{} did not load the image: {reason}", vm.at())));
            }
            _ => {}
        }
        watcher.show(&feed.progress(progress));
        pause(vm, watcher)?;
    }
}

/// Until the next look: an event, an operator's wish, or the time.
fn pause(vm: &mut Vm, watcher: &mut dyn Watch) -> Result<(), DriveError> {
    let until = Instant::now() + LOOK;
    loop {
        if watcher.wish() != Wish::Continue {
            return Err(DriveError::Cancelled("cancelled".into()));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        if vm.next_event(left.min(BLINK))?.is_some_and(|event| event.name == "MIGRATION") {
            return Ok(());
        }
    }
}

/// After a failure: ends a VM that can load nothing any more. Gives back the error with what became of it.
fn end(vm: &mut Vm, error: DriveError, feed: &Feed) -> DriveError {
    if error.is_disconnect() {
        let reason = feed.failure().map_or(String::new(), |reason| format!(" ({reason})"));
        return DriveError::Lost(format!(
            "{} ended while it loaded the image{reason}; the image is unchanged",
            vm.at()
        ));
    }
    // It may be gone by now.
    let _ = vm.execute("quit", Value::Null);
    let say = |text: &str| {
        format!("{}; the VM was ended, because it cannot load anything any more", text.trim_end_matches('.'))
    };
    match error {
        DriveError::Cancelled(text) => DriveError::Cancelled(say(&text)),
        other => DriveError::Failed(say(&other.to_string())),
    }
}
