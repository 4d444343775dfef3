//! Saving a guest into an image through its monitor.
//!
//! # The way of a save
//! The guest is stopped, and written once, at full speed. QEMU writes what it can write itself ([`written`]):
//! descriptors of a file that lies aside of its place are passed to it, so that neither its namespace nor its user
//! matters. What it cannot write comes through a pipe and is compressed here ([`piped`]). Then the image is checked, put
//! on the disk, and moved into its place.
//!
//! # What becomes of the guest
//! After a good save it is stopped (`postmigrate` in a QEMU, whatever it was), as after `virsh save`, or continued if
//! that was asked for and it ran. After any failure it is as before, so are the VM's settings, and there is no file.
//! Should this process die in the middle, QEMU is left to itself: its guest stays stopped (`postmigrate`, or `paused`
//! where it wrote into our pipe), settings are those of the save, a `.partial` may lie beside the image's place, and
//! `cont` lets the guest run on.

mod check;
mod format;
mod head;
mod piped;
mod request;
mod run_state;
mod setup;
mod written;

use std::time::{Duration, Instant};

pub(super) use check::stream as check_stream;
pub use format::{Format, newest_libvirt_format, newest_libvirt_format_here};
pub use request::{Domain, SaveRequest};
pub(super) use setup::{OFF, READERS, channels};

use super::{Changed, DriveError, Progress, Settings, Trace, Vm, Watch, watch};

/// How long a cancelled migration may take to end, and a guest to go on.
const BACK_LIMIT: Duration = Duration::from_secs(30);

/// The name under which the VM gets a descriptor of a file or a pipe.
const NAME: &str = "sterna-save";
/// The run state of a guest that runs.
const RUNNING: &str = "running";

/// A good save.
#[derive(Debug, Clone)]
pub struct Saved {
    /// Whether the guest ran before, and will run when it is restored.
    pub was_running: bool,
    /// Whether the guest runs now.
    pub is_running: bool,
    /// The image's length in bytes.
    pub file_bytes: u64,
    /// Bytes of the disk that it takes.
    pub allocated_bytes: u64,
    /// Whether pages went past the page cache.
    pub is_direct: bool,
    /// Threads that wrote pages.
    pub channels: u32,
    /// From the command to the file in its place.
    pub total: Duration,
    /// Of that, checking the image and putting it on the disk.
    pub settling: Duration,
    /// What was seen of the migration.
    pub trace: Trace,
    /// What could not be put back as it was, as a sentence.
    pub warning: Option<String>,
}

/// Saves the guest of `vm`.
///
/// # Errors
/// See [`DriveError`] and the module's documentation: the guest is as before, unless its VM is gone
/// ([`DriveError::Lost`]).
pub fn save(vm: &mut Vm, request: &SaveRequest, watcher: &mut dyn Watch) -> Result<Saved, DriveError> {
    let began = Instant::now();
    let settings = Settings::read(vm)?;
    let state = setup::check(vm, &settings, request)?;
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
                warning = Some(format!("the image is good, but the guest could not be resumed: {error}"))
            }
        }
    }
    Ok(Saved {
        was_running,
        is_running,
        file_bytes: file.file_bytes,
        allocated_bytes: file.allocated_bytes,
        is_direct: file.is_direct,
        channels: channels(request.format.form, request.channels, setup::WRITERS),
        total: began.elapsed(),
        settling,
        trace,
        warning,
    })
}

/// Who writes the file.
enum Road {
    Written(written::Written),
    Piped(piped::Piped),
}

/// A file in its place.
struct Settled {
    file_bytes: u64,
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
        if request.format.is_compressed() {
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
        // Sterna's own VMM stays awake while it saves, and its stream says what the guest is when it leaves.
        if is_live && !vm.is_sterna() {
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

    /// A VM that writes into a pipe must not wait for a reader that is none any more.
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

/// After a failure: ends the migration, lets the guest run on if it was live, and puts the settings back, whichever of
/// these goes wrong. Gives back the error with what became of the guest.
fn back(vm: &mut Vm, changed: Changed, is_live: bool, error: DriveError) -> DriveError {
    match bring_back(vm, changed, is_live) {
        Ok(()) => {
            let guest = if is_live { "the guest runs on" } else { "the guest is unchanged" };
            let say = |text: &str| format!("{}; {guest}, and there is no image", text.trim_end_matches('.'));
            match error {
                DriveError::Cancelled(text) => DriveError::Cancelled(say(&text)),
                DriveError::Detached(_) => DriveError::Cancelled(say("cancelled")),
                other => DriveError::Failed(say(&other.to_string())),
            }
        }
        Err(second) if second.is_disconnect() || error.is_disconnect() => DriveError::Lost(format!(
            "the connection to {}'s monitor was lost during the save, and there is no image: if its process has ended, \
             the guest is lost with it",
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

fn end_migration(vm: &mut Vm, deadline: Instant) -> Result<(), DriveError> {
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

/// A VM may refuse `cont` for a moment while its migration ends.
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
