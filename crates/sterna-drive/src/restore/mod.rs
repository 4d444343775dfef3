//! Restores a guest from an image into a VM that waits for one (`-incoming defer`).
//!
//! # Steps of a restore
//! The image is examined before the VM reads it ([`Subject`]). Otherwise QEMU 11.1 crashes on a truncated mapped-ram
//! image when it loads with multifd, and loads other images into the wrong machine without an error
//! (specs/mapped-ram.md §6). Machine type, block names and sizes are compared with the machine's. Then QEMU loads a
//! mapped-ram image itself, from descriptors that are passed to it. Streams, compressed or not, are written to it
//! through a pipe and checked meanwhile.
//!
//! # State of the guest
//! The guest starts if it ran when it was saved, unless the operator requests otherwise. After a failure a QEMU is
//! ended, as it would end by itself: its RAM is partly loaded, and nothing else can be loaded into it.

mod cached;
mod devices;
mod examine;
pub mod launch;
pub mod lazy;
mod loaded;
mod request;
mod setup;
mod start;

use std::time::{Duration, Instant};

use serde_json::Value;

pub use examine::Subject;
use loaded::Feed;
pub use request::{RestoreRequest, Start};
use sterna_qmp::ClientError;

use super::{DriveError, Progress, Settings, Vm, Watch, Wish};

/// Interval between two queries when no event arrives.
const LOOK: Duration = Duration::from_millis(100);
const BLINK: Duration = Duration::from_millis(20);

/// The result of a successful restore.
#[derive(Debug, Clone)]
pub struct Restored {
    /// The image's format, such as `libvirt-sparse`.
    pub kind: String,
    /// Size of the RAM blocks in the image, in bytes.
    pub ram_bytes: u64,
    /// Whether the guest runs now.
    pub is_running: bool,
    /// Whether the guest should run, by its image or the request.
    pub should_run: bool,
    /// Whether pages went past the page cache.
    pub is_direct: bool,
    /// Number of threads that read pages.
    pub channels: u32,
    /// Time from the command until the guest can run.
    pub total: Duration,
    /// Part of `total` in which the image was examined.
    pub examining: Duration,
    /// Sentences for the operator.
    pub warnings: Vec<String>,
}

/// Restores the image into `vm`.
///
/// # Errors
/// See [`DriveError`]. [`DriveError::Unfit`]: the VM has received nothing and still waits.
pub fn restore(
    vm: &mut Vm,
    request: &RestoreRequest,
    watcher: &mut dyn Watch,
) -> Result<Restored, DriveError> {
    let began = Instant::now();
    let subject = Subject::examine(&request.path, &request.access)?;
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
    let wants_to_run = start::decide(vm, request.start, subject.was_running(), &mut warnings);
    // The last byte of a compressed image is not checked yet. Its guest is started by `cont` after that check.
    // The run state inside a bare stream is unknown here. The VM reads it.
    let is_held = wants_to_run == Some(false) || wants_to_run == Some(true) && !subject.is_whole();
    if let Err(error) = begin(vm, &feed, is_held) {
        feed.clean(vm);
        // The caller must get `error`, not an error of the undo.
        let _ = changed.undo(vm);
        return Err(error);
    }
    if let Err(error) = load(vm, &mut feed, watcher) {
        return Err(end(vm, error, &feed));
    }
    // The guest is loaded and may run. From here on an error must not end it.
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
        kind: subject.format().to_string(),
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

/// Makes the VM load. `is_held`: the guest must not start by itself.
fn begin(vm: &mut Vm, feed: &Feed, is_held: bool) -> Result<(), DriveError> {
    let held = if is_held { Some(start::Held::new(vm)?) } else { None };
    let Err(error) = vm.migrate_incoming(&feed.uri()) else { return Ok(()) };
    if let Some(held) = held {
        held.release(vm);
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

/// Waits from `migrate-incoming` until the last device is loaded.
fn load(vm: &mut Vm, feed: &mut Feed, watcher: &mut dyn Watch) -> Result<(), DriveError> {
    loop {
        let progress = match vm.progress() {
            // QEMU may answer no command while it loads.
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

/// Waits until the next query is due: at an event, at an operator's wish, or after `LOOK`.
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

/// Ends a VM that can load nothing else after a failure. Returns the error with the VM's state added.
fn end(vm: &mut Vm, error: DriveError, feed: &Feed) -> DriveError {
    if error.is_disconnect() {
        let reason = feed.failure().map_or(String::new(), |reason| format!(" ({reason})"));
        return DriveError::Lost(format!(
            "{} ended while it loaded the image{reason}; the image is unchanged",
            vm.at()
        ));
    }
    // The VM may have ended already.
    let _ = vm.execute("quit", Value::Null);
    let say = |text: &str| {
        format!("{}; the VM was ended, because it cannot load anything any more", text.trim_end_matches('.'))
    };
    match error {
        DriveError::Cancelled(text) => DriveError::Cancelled(say(&text)),
        other => DriveError::Failed(say(&other.to_string())),
    }
}
