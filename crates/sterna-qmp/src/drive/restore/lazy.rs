//! Restoring lazily: the guest runs at once, and its memory follows by postcopy (specs/postcopy.md).
//!
//! The image is served to the VM by this process, over a Unix socket. If the connection breaks, the VM is told to listen again
//! (`migrate-recover`) and gets what it lacks. Until all pages are there the guest depends on this process and on the image:
//! without them it stands still at the first page that is missing, and goes on when another process serves it.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use sterna::MigrationError;
use sterna::postcopy::{
    Dial, GuestState, ServeFailure, ServeOptions, ServeStatistics, ServedImage, Serving, Stage,
};
use sterna_transport::Address;

use super::{Start, Subject, run};
use crate::client::ClientError;
use crate::drive::{Changed, DriveError, Progress, Settings, Vm, Watch, Wish, save};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// How to restore lazily.
#[derive(Debug, Clone)]
pub struct LazyRequest<'a> {
    /// Whether the guest starts.
    pub start: Start,
    /// How long to try to go on after a broken connection.
    pub reconnect_window: Duration,
    /// Where the VM's socket is made. It must stay until the guest has all of its memory.
    pub directory: &'a Path,
}

/// A good lazy restore: the guest has all of its memory.
#[derive(Debug, Clone)]
pub struct LazilyRestored {
    /// Whether the guest runs now.
    pub is_running: bool,
    /// Whether it was to run.
    pub should_run: bool,
    /// From the begin until the guest could run.
    pub until_guest: Duration,
    /// From the begin until it had all of its memory.
    pub total: Duration,
    /// What was sent.
    pub statistics: ServeStatistics,
    /// Whether requested pages had a channel of their own.
    pub preempt: bool,
    /// What is worth knowing, each a sentence.
    pub warnings: Vec<String>,
}

/// Why a lazy restore ended early, and where that leaves the guest.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct LazyFailure {
    /// What happened.
    #[source]
    pub error: DriveError,
    /// [`GuestState::NeedsImage`]: the VM keeps the guest, paused, and must not be ended.
    pub guest: GuestState,
}

impl From<DriveError> for LazyFailure {
    fn from(error: DriveError) -> Self {
        Self { error, guest: GuestState::Nowhere }
    }
}

/// Restores `image`, which `subject` has examined, into `vm`, and returns when the guest has all of its memory.
///
/// # Errors
/// [`LazyFailure`]. [`GuestState::Nowhere`]: the guest has not been started; a VM that had begun to load was ended.
pub fn restore_lazily(
    vm: &mut Vm,
    subject: &Subject,
    image: Arc<ServedImage>,
    request: &LazyRequest<'_>,
    watcher: &mut dyn Watch,
) -> Result<LazilyRestored, LazyFailure> {
    let began = Instant::now();
    let settings = Settings::read(vm)?;
    super::setup::check_waits(vm, &settings)?;
    let mut warnings = subject.compare_as_stream(vm)?;
    let should_run = match request.start {
        Start::AsItWas => subject.was_running().unwrap_or_else(|| image.shape().was_running()),
        Start::Paused => false,
        Start::Running => true,
    };
    let (changed, preempt) = change(vm, &settings, &image)?;
    let path = request.directory.join("pages");
    let uri = format!("unix:{}", path.display());
    if let Err(error) = listen(vm, &uri, should_run) {
        // What must be heard is why it does not begin.
        let _ = changed.undo(vm);
        return Err(error.into());
    }
    let options =
        ServeOptions { preempt, reconnect_window: request.reconnect_window, ..ServeOptions::default() };
    let serving = Serving::start(image, Arc::new(Dial(Address::Unix(path))), options);
    let serving = serving.map_err(|error| DriveError::Failed(error.to_string()))?;
    let until_guest = follow(vm, &serving, &uri, began, watcher);
    if let Err(failure) = serving.wait() {
        return Err(fail(vm, failure, until_guest.err(), preempt));
    }
    if should_run && let Err(error) = run(vm) {
        warnings.push(format!("the guest has all of its memory but does not run: {error}; `cont` starts it"));
    }
    let total = began.elapsed();
    if let Err(error) = changed.undo(vm) {
        warnings.push(format!("the VM's settings could not be restored: {error}"));
    }
    let is_running = vm.run_state().map(|state| state == "running").unwrap_or_else(|error| {
        warnings.push(format!("it is unknown whether the guest runs: {error}"));
        false
    });
    let statistics = serving.statistics();
    let until_guest = until_guest.ok().flatten().unwrap_or(total);
    Ok(LazilyRestored { is_running, should_run, until_guest, total, statistics, preempt, warnings })
}

/// Sets the VM up for postcopy. Gives back what was changed, and whether it has a channel for requested pages.
fn change(vm: &mut Vm, settings: &Settings, image: &ServedImage) -> Result<(Changed, bool), DriveError> {
    if settings.capability("postcopy-ram").is_none() {
        return Err(DriveError::Unfit(format!(
            "{} ({}) has no postcopy: restore the image without --lazy",
            vm.at(),
            vm.version()
        )));
    }
    let preempt = settings.capability("postcopy-preempt").is_some();
    let shape = image.shape();
    let mut capabilities: Vec<(&str, bool)> = save::OFF
        .iter()
        .filter(|name| !matches!(**name, "postcopy-ram" | "postcopy-preempt" | "validate-uuid"))
        .map(|name| (*name, false))
        .collect();
    capabilities.extend([
        ("validate-uuid", shape.configuration.uuid.is_some()),
        ("events", true),
        ("mapped-ram", false),
        ("multifd", false),
        ("postcopy-ram", true),
        ("postcopy-preempt", preempt),
    ]);
    let mut parameters = Map::new();
    parameters.insert("tls-creds".into(), json!(""));
    let changed = settings.change(vm, &capabilities, &parameters).map_err(|error| match error {
        DriveError::Monitor { error: ClientError::Refused { desc, .. }, at } => DriveError::Unfit(format!(
            "{at} refuses postcopy: {desc}. If this host forbids it to ordinary users, allow it \
             (`vm.unprivileged_userfaultfd`, or access to /dev/userfaultfd), or restore without --lazy"
        )),
        error => error,
    })?;
    Ok((changed, preempt))
}

fn listen(vm: &mut Vm, uri: &str, should_run: bool) -> Result<(), DriveError> {
    if !should_run {
        // While it waits, this only says that the guest must not start by itself.
        vm.execute("stop", Value::Null)?;
    }
    vm.migrate_incoming(uri)
}

/// Watches until serving is over. Gives back when the guest could run; the error is why the VM was lost, or that the operator
/// wants the end.
fn follow(
    vm: &mut Vm,
    serving: &Serving,
    uri: &str,
    began: Instant,
    watcher: &mut dyn Watch,
) -> Result<Option<Duration>, DriveError> {
    let mut until_guest = None;
    let mut has_recovered = false;
    loop {
        let statistics = serving.statistics();
        match statistics.stage {
            Stage::Active => {
                until_guest.get_or_insert_with(|| began.elapsed());
                has_recovered = false;
            }
            // It refuses until it has noticed the break, and once it listens.
            Stage::Paused if !has_recovered => match vm.migrate_recover(uri) {
                Ok(()) => has_recovered = true,
                Err(ClientError::Refused { .. } | ClientError::TimedOut { .. }) => {}
                Err(error) => return lost(serving, vm.error(error)),
            },
            _ => {}
        }
        if statistics.is_over() {
            return Ok(until_guest);
        }
        watcher.show(&progress(&statistics));
        let may_run = !matches!(statistics.stage, Stage::Connecting);
        match watcher.wish() {
            // It goes on so already.
            Wish::Continue | Wish::StartPostcopy => {}
            Wish::Cancel if may_run => watcher.note(
                "the guest lacks pages and would stand still: restoring goes on (Ctrl-C again stops it; the guest then \
                 stays paused until it is served again)",
            ),
            Wish::Cancel | Wish::Detach => serving.stop(),
        }
        // Only that the monitor is still there matters.
        if let Err(error) = vm.next_event(LOOK) {
            return lost(serving, error);
        }
    }
}

fn lost(serving: &Serving, error: DriveError) -> Result<Option<Duration>, DriveError> {
    serving.stop();
    Err(error)
}

/// What to say, and what becomes of the VM.
fn fail(vm: &mut Vm, failure: ServeFailure, lost: Option<DriveError>, preempt: bool) -> LazyFailure {
    let ServeFailure { error, guest } = failure;
    let is_cancelled = matches!(error, MigrationError::Cancelled);
    if let Some(lost) = lost {
        let text = format!("{} is gone ({lost}), and the guest with it; the image is unchanged", vm.at());
        return LazyFailure { error: DriveError::Lost(text), guest: GuestState::Nowhere };
    }
    if guest == GuestState::NeedsImage {
        let why = if is_cancelled { "stopped".to_owned() } else { error.to_string() };
        let text = format!(
            "{why}; the guest lacks pages and stays paused at {}: keep the image, give that monitor `migrate-recover` with an \
             address, and serve it with `sterna serve IMAGE ADDRESS --recover{}`",
            vm.at(),
            if preempt { " --preempt" } else { "" },
        );
        let error = if is_cancelled { DriveError::Detached(text) } else { DriveError::Failed(text) };
        return LazyFailure { error, guest };
    }
    // Why it refused, it says to its monitor.
    let reason = vm.progress().ok().and_then(|progress| progress.error);
    // It may be gone by now, and can load nothing any more.
    let _ = vm.execute("quit", Value::Null);
    let error = if is_cancelled {
        DriveError::Cancelled("cancelled; the VM was ended, because it cannot load anything any more".into())
    } else {
        let reason = reason.map_or(String::new(), |reason| format!(" ({reason})"));
        // It goes on reading, whatever failed.
        let silent = match error {
            MigrationError::Limit { .. } => {
                ". A QEMU that cannot load the devices does not report it: start it with the machine and the devices \
                 that were saved"
            }
            _ => "",
        };
        DriveError::Failed(format!(
            "{} did not take the guest: {error}{reason}; the VM was ended, and the image is unchanged{silent}",
            vm.at()
        ))
    };
    LazyFailure { error, guest }
}

fn progress(statistics: &ServeStatistics) -> Progress {
    let page = 4096;
    Progress {
        status: match statistics.stage {
            Stage::Connecting | Stage::Loading => "starting",
            Stage::Paused => "reconnecting",
            _ => "running",
        }
        .into(),
        total_bytes: statistics.total_pages * page,
        remaining_bytes: statistics.missing_pages * page,
        transferred_bytes: statistics.written_bytes,
        ..Progress::default()
    }
}
