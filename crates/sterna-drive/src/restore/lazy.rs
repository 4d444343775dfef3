//! Restores lazily: the guest runs immediately, and its memory follows by postcopy (specs/postcopy.md).
//!
//! This process serves the image to the VM over a Unix socket. If the connection breaks, the VM is told to listen
//! again (`migrate-recover`), and gets the missing pages. Until all pages are there, the guest depends on this
//! process and on the image. Without them it blocks at the first missing page, and continues when another process
//! serves the image.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use sterna::MigrationError;
use sterna_opaque::serve::{
    Dial, GuestState, ServeFailure, ServeOptions, ServeStatistics, ServedImage, Serving, Stage,
};
use sterna_qmp::ClientError;
use sterna_transport::Address;

use super::{Start, Subject, run, start};
use crate::{Changed, DriveError, Progress, Settings, Vm, Watch, Wish, save};

/// Interval between two checks.
const LOOK: Duration = Duration::from_millis(20);

/// The options of a lazy restore.
#[derive(Debug, Clone)]
pub struct LazyRequest<'a> {
    /// Whether the guest starts.
    pub start: Start,
    /// How long to try to reconnect after a broken connection.
    pub reconnect_window: Duration,
    /// Directory of the VM's socket. It must exist until the guest has all of its memory.
    pub directory: &'a Path,
}

/// The result of a successful lazy restore: the guest has all of its memory.
#[derive(Debug, Clone)]
pub struct LazilyRestored {
    /// Whether the guest runs now.
    pub is_running: bool,
    /// Whether the guest should run, by its image or the request.
    pub should_run: bool,
    /// Time from the start until the guest could run.
    pub until_guest: Duration,
    /// Time from the start until the guest had all of its memory.
    pub total: Duration,
    /// Statistics of the sent pages.
    pub statistics: ServeStatistics,
    /// Whether requested pages had their own channel.
    pub preempt: bool,
    /// Sentences for the operator.
    pub warnings: Vec<String>,
}

/// The error of a lazy restore, and the state in which it leaves the guest.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct LazyFailure {
    /// The cause of the failure.
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

/// Restores `image` into `vm`, and returns when the guest has all of its memory. `subject` is the examined image.
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
    let was_running = subject.was_running().unwrap_or_else(|| image.shape().was_running());
    let should_run = start::decide(vm, request.start, Some(was_running), &mut warnings) == Some(true);
    let (changed, preempt) = change(vm, &settings, &image)?;
    let path = request.directory.join("pages");
    let uri = format!("unix:{}", path.display());
    if let Err(error) = listen(vm, &uri, should_run) {
        // The caller must get `error`, not an error of the undo.
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

/// Sets the VM up for postcopy. Returns the changes, and whether requested pages have their own channel.
fn change(vm: &mut Vm, settings: &Settings, image: &ServedImage) -> Result<(Changed, bool), DriveError> {
    if settings.capability("postcopy-ram").is_none() {
        return Err(DriveError::Unfit(format!(
            "{} ({}) has no postcopy: restore the image without --lazy",
            vm.at(),
            vm.version()
        )));
    }
    // QEMU 7 waits for the channel for requested pages before it reads the stream (specs/postcopy.md §6).
    let preempt = settings.capability("postcopy-preempt").is_some() && vm.major_version() >= 8;
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
            "{at} refuses postcopy: {desc}. If this host does not permit userfaultfd to ordinary users, permit it \
             (`vm.unprivileged_userfaultfd`, or access to /dev/userfaultfd), or restore without --lazy"
        )),
        error => error,
    })?;
    Ok((changed, preempt))
}

fn listen(vm: &mut Vm, uri: &str, should_run: bool) -> Result<(), DriveError> {
    let held = if should_run { None } else { Some(start::Held::new(vm)?) };
    let begun = vm.migrate_incoming(uri);
    if let (Err(_), Some(held)) = (&begun, held) {
        held.release(vm);
    }
    begun
}

/// Watches the VM until serving is over. Returns the time when the guest could run. The error is the reason why the VM
/// was lost, or the operator's cancel.
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
            // The VM refuses until it has noticed the broken connection, and again after it has begun to listen.
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
            // The restore already runs in postcopy.
            Wish::Continue | Wish::StartPostcopy => {}
            Wish::Cancel if may_run => watcher.note(
                "the guest still lacks pages and would stop: restoring continues (Ctrl-C again ends it; the guest \
                 then stays paused until it is served again)",
            ),
            Wish::Cancel | Wish::Detach => serving.stop(),
        }
        // Reading an event here only checks that the monitor is still connected.
        if let Err(error) = vm.next_event(LOOK) {
            return lost(serving, error);
        }
    }
}

fn lost(serving: &Serving, error: DriveError) -> Result<Option<Duration>, DriveError> {
    serving.stop();
    Err(error)
}

/// Ends a VM that cannot continue, and describes the state of the guest.
fn fail(vm: &mut Vm, failure: ServeFailure, lost: Option<DriveError>, preempt: bool) -> LazyFailure {
    let ServeFailure { error, guest } = failure;
    let is_cancelled = matches!(error, MigrationError::Cancelled);
    if let Some(lost) = lost {
        let text = format!("{} has ended ({lost}), and the guest with it; the image is unchanged", vm.at());
        return LazyFailure { error: DriveError::Lost(text), guest: GuestState::Nowhere };
    }
    if guest == GuestState::NeedsImage {
        let why = if is_cancelled { "stopped".to_owned() } else { error.to_string() };
        let text = format!(
            "{why}; the guest lacks pages and stays paused at {}: keep the image, give that monitor `migrate-recover` with an \
             address (`migrate-pause` before, if its migration is still postcopy-active), and serve it with `sterna serve IMAGE \
             ADDRESS --recover{}`",
            vm.at(),
            if preempt { " --preempt" } else { "" },
        );
        let error = if is_cancelled { DriveError::Detached(text) } else { DriveError::Failed(text) };
        return LazyFailure { error, guest };
    }
    // The VM reports the reason of its refusal on its monitor.
    let reason = vm.progress().ok().and_then(|progress| progress.error);
    // The VM may have ended already. It cannot load anything else.
    let _ = vm.execute("quit", Value::Null);
    let error = if is_cancelled {
        DriveError::Cancelled("cancelled; the VM was ended, because it cannot load anything any more".into())
    } else {
        let reason = reason.map_or(String::new(), |reason| format!(" ({reason})"));
        // A QEMU that fails to load devices continues to read, so this side only times out.
        let silent = match error {
            MigrationError::Limit { .. } => {
                ". A QEMU that cannot load the devices does not report it: start it with the machine and the devices \
                 that were saved"
            }
            _ => "",
        };
        DriveError::Failed(format!(
            "{} did not load the guest: {error}{reason}; the VM was ended, and the image is unchanged{silent}",
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
