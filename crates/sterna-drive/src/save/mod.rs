//! Saves a guest into an image through its monitor.
//!
//! # Steps of a save
//! A guest of Sterna's own VM that was restored before its memory was loaded gets all of it first, while it runs ([`rest`]).
//! Then the guest is stopped, and written once, at full speed. QEMU writes the formats that it knows itself ([`written`]):
//! it gets descriptors of a staging file, so that its mount namespace and user do not matter. Other formats are
//! compressed here, from a stream that arrives through a pipe ([`piped`]). Then the image is checked, flushed to the
//! disk, and renamed to its place.
//!
//! # State of the guest
//! After a successful save the guest is stopped, as after `virsh save` (a QEMU reports `postmigrate`). If this was
//! requested and the guest ran before, it resumes. After any failure, guest and settings are as before, and there is
//! no file.
//!
//! If this process dies during the save, QEMU continues without it. Its guest stays stopped (`postmigrate`, or
//! `paused` if QEMU wrote into our pipe), and its settings are those of the save. A file `.partial` may be left next
//! to the image's path. `cont` resumes the guest.

mod check;
pub(crate) mod frames;
mod head;
mod newest;
mod piped;
mod request;
mod rest;
mod run_state;
mod setup;
pub(crate) mod stream;
mod written;

use std::time::{Duration, Instant};

pub(super) use check::{description, stream as check_stream};
pub use newest::{newest_format, newest_libvirt_format, newest_libvirt_format_here};
pub use request::{Domain, SaveRequest};
pub(super) use setup::{OFF, READERS, channels};

use sterna_image::Format;

use super::{Changed, DriveError, Progress, Settings, Trace, Vm, Watch, watch};

/// How long a cancelled migration may take to end, and again the guest to resume.
pub(crate) const BACK_LIMIT: Duration = Duration::from_secs(30);

/// Name of the descriptor, of a file or a pipe, in the VM.
pub(crate) const NAME: &str = "sterna-save";
/// QEMU's name for the run state of a running guest.
const RUNNING: &str = "running";

/// The result of a successful save.
#[derive(Debug, Clone)]
pub struct Saved {
    /// Whether the guest ran before, so that it will start when it is restored.
    pub was_running: bool,
    /// Whether the guest runs now.
    pub is_running: bool,
    /// Length of the image, in bytes.
    pub file_bytes: u64,
    /// Disk space that the image occupies, in bytes.
    pub allocated_bytes: u64,
    /// Whether pages went past the page cache.
    pub is_direct: bool,
    /// Number of threads that wrote pages.
    pub channels: u32,
    /// Time from the command until the file is in its place.
    pub total: Duration,
    /// Part of `total` in which the image was checked and flushed to the disk.
    pub settling: Duration,
    /// The observed progress of the migration.
    pub trace: Trace,
    /// A sentence about settings that could not be restored, if any.
    pub warning: Option<String>,
}

/// Saves the guest of `vm`.
///
/// # Errors
/// See [`DriveError`] and the module's documentation: the guest is unchanged, unless its VM has ended
/// ([`DriveError::Lost`]).
pub fn save(vm: &mut Vm, request: &SaveRequest, watcher: &mut dyn Watch) -> Result<Saved, DriveError> {
    let began = Instant::now();
    let settings = Settings::read(vm)?;
    let mut state = setup::check(vm, &settings, request)?;
    if rest::load(vm, watcher)? {
        // An operator may have paused or started the guest meanwhile.
        state = setup::check(vm, &settings, request)?;
    }
    let was_running = state == RUNNING;
    let is_live = was_running || state == "suspended";
    let mut road = Road::begin(vm, &settings, request, &state)?;
    let changed = match setup::change(vm, &settings, request, road.is_direct()) {
        Ok(changed) => changed,
        Err(error) => {
            road.clean(vm);
            return Err(error);
        }
    };
    let saved = road.run(vm, is_live, watcher).and_then(|trace| {
        let settling = Instant::now();
        let file = road.settle(vm, request, &state)?;
        Ok((trace, file, settling.elapsed()))
    });
    if saved.is_err() {
        road.give_up();
    }
    road.clean(vm);
    let (trace, file, settling) = match saved {
        Ok(saved) => saved,
        Err(error) => return Err(back(vm, changed, is_live, error)),
    };
    let mut warning =
        changed.undo(vm).err().map(|error| format!("the VM's settings could not be restored: {error}"));
    let mut is_running = false;
    if request.resume_after && is_live {
        match vm.execute("cont", serde_json::Value::Null) {
            Ok(_) => is_running = true,
            Err(error) => {
                warning = Some(format!("the image is complete, but the guest could not be resumed: {error}"))
            }
        }
    }
    Ok(Saved {
        was_running,
        is_running,
        file_bytes: file.file_bytes,
        allocated_bytes: file.allocated_bytes,
        is_direct: file.is_direct,
        channels: channels(setup::form(request), request.channels, setup::WRITERS),
        total: began.elapsed(),
        settling,
        trace,
        warning,
    })
}

/// The writer of the file: the VM, or this process.
enum Road {
    Written(written::Written),
    Piped(piped::Piped),
}

/// A complete image in its place.
pub(crate) struct Settled {
    pub(crate) file_bytes: u64,
    allocated_bytes: u64,
    is_direct: bool,
}

impl Road {
    fn begin(
        vm: &mut Vm,
        settings: &Settings,
        request: &SaveRequest,
        state: &str,
    ) -> Result<Self, DriveError> {
        if request.format.is_compressed() || request.format == Format::Sterna {
            return Ok(Self::Piped(piped::Piped::begin(vm, request, state)?));
        }
        Ok(Self::Written(written::Written::begin(vm, settings, request, state == RUNNING)?))
    }

    fn is_direct(&self) -> bool {
        match self {
            Self::Written(written) => written.is_direct(),
            Self::Piped(_) => false,
        }
    }

    fn run(&mut self, vm: &mut Vm, is_live: bool, watcher: &mut dyn Watch) -> Result<Trace, DriveError> {
        let uri = match self {
            Self::Written(written) => written.uri(),
            Self::Piped(piped) => piped.uri(),
        };
        // Sterna's VMM answers its monitor while it saves into a file, and the file contains the guest's run state before
        // the stop.
        if is_live && !(vm.is_sterna() && matches!(self, Self::Written(_))) {
            vm.execute("stop", serde_json::Value::Null)?;
        }
        vm.execute("migrate", serde_json::json!({ "uri": uri }))?;
        let trace = watch(vm, watcher, Duration::MAX)?;
        let end = trace.last();
        if end.status == "completed" {
            return Ok(trace);
        }
        let Progress { status, error, .. } = end;
        if trace.was_cancelled || status == "cancelled" {
            return Err(DriveError::Cancelled("cancelled".into()));
        }
        let own = match self {
            Self::Written(written) => written.explain(),
            Self::Piped(piped) => piped.failure(),
        };
        let reason = own.or(error).unwrap_or_else(|| format!("the migration ended as `{status}`"));
        Err(DriveError::Failed(format!("{} was not saved: {reason}", vm.at())))
    }

    fn settle(&mut self, vm: &mut Vm, request: &SaveRequest, state: &str) -> Result<Settled, DriveError> {
        match self {
            Self::Written(written) => written.settle(vm, request, state),
            Self::Piped(piped) => piped.settle(),
        }
    }

    /// Ends the pipe's thread, because a VM that writes into a pipe without a reader would block.
    fn give_up(&mut self) {
        if let Self::Piped(piped) = self {
            piped.give_up();
        }
    }

    fn clean(&mut self, vm: &mut Vm) {
        match self {
            Self::Written(written) => written.clean(vm),
            Self::Piped(piped) => piped.clean(vm),
        }
    }
}

/// Called after a failure: ends the migration, resumes the guest if it ran, and restores the settings. Each step is
/// tried, even if others fail. Returns the error with the state of the guest added.
fn back(vm: &mut Vm, changed: Changed, is_live: bool, error: DriveError) -> DriveError {
    match bring_back(vm, changed, is_live) {
        Ok(()) => {
            let guest = if is_live { "the guest continues to run" } else { "the guest is unchanged" };
            let say = |text: &str| format!("{}; {guest}, and there is no image", text.trim_end_matches('.'));
            match error {
                DriveError::Cancelled(text) => DriveError::Cancelled(say(&text)),
                DriveError::Detached(_) => DriveError::Cancelled(say("cancelled")),
                other => DriveError::Failed(say(&other.to_string())),
            }
        }
        Err(second) if second.is_disconnect() || error.is_disconnect() => DriveError::Lost(format!(
            "the connection to {}'s monitor was lost during the save, and there is no image: if its process has \
             ended, the guest is lost",
            vm.at()
        )),
        Err(second) => DriveError::Failed(format!(
            "{error}; there is no image, and the guest's state could not be restored: {second}"
        )),
    }
}

fn bring_back(vm: &mut Vm, changed: Changed, is_live: bool) -> Result<(), DriveError> {
    let deadline = Instant::now() + BACK_LIMIT;
    let ended = end_migration(vm, deadline);
    let continued = if is_live { go_on(vm, deadline) } else { Ok(()) };
    let undone = changed.undo(vm);
    ended.and(continued).and(undone)
}

pub(crate) fn end_migration(vm: &mut Vm, deadline: Instant) -> Result<(), DriveError> {
    let mut has_asked = false;
    while !vm.progress()?.is_over() {
        if !has_asked {
            has_asked = true;
            vm.execute("migrate_cancel", serde_json::Value::Null)?;
        }
        if Instant::now() > deadline {
            return Err(DriveError::Failed(format!(
                "the migration did not end within {BACK_LIMIT:?} after it was cancelled"
            )));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Resumes the guest. Retries until `deadline`, because a VM may refuse `cont` while its migration ends.
fn go_on(vm: &mut Vm, deadline: Instant) -> Result<(), DriveError> {
    loop {
        if vm.run_state()? == RUNNING {
            return Ok(());
        }
        match vm.execute("cont", serde_json::Value::Null) {
            Ok(_) => return Ok(()),
            Err(error) if error.is_disconnect() || Instant::now() > deadline => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}
