//! The handle of a protection: begin, query, end.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::json;
use sterna_standby::machines::Ruling;
use sterna_standby::machines::primary::{Because, Event, Outcome, Refusal, State};
use sterna_standby::{
    ArbiterIdentity, Claims, ContactError, ContactState, PrimaryContact, Watchdog, checkpoints_hang,
};
use sterna_transport::Channel;

use super::check::{self, Fit};
use super::disks::{self, Disks};
use super::gate::GateStatistics;
use super::gates::{self, Gates};
use super::guard::Guard;
use super::leave;
use super::monitor::Monitor;
use super::nics::{self, Nic};
use super::relay::{Relay, Steps};
use super::request::ProtectRequest;
use super::sockets::SocketDirectory;
use crate::error::DriveError;
use crate::settings::Changed;
use crate::vm::{ANSWER_LIMIT, Vm};

/// How long the standby may take to accept the contact's connection and to greet.
const CONTACT_LIMIT: Duration = Duration::from_secs(10);

/// Interval between two queries of the network cards.
const LOOK_AT_NICS: Duration = Duration::from_millis(50);

/// The reason for the end of a protection whose QEMU was told to cancel its migration.
const CANCELLED: &str =
    "another client cancelled QEMU's migration to the standby (`migrate_cancel`, `virsh domjobabort`)";

/// A running protection. Call [`QemuProtection::finish`] when it has an outcome: only that restores QEMU.
///
/// If the handle is dropped earlier, the protection continues until this process ends. QEMU then stays in COLO and
/// without network, whether or not its guest runs, and the standby may take the guest over.
pub struct QemuProtection {
    guard: Arc<Guard>,
    contact: PrimaryContact,
    remarks: Vec<String>,
    began: Instant,
    checkpoint_delay: Duration,
    undo: Mutex<Option<Undo>>,
    is_over: Arc<AtomicBool>,
    watch: Mutex<Option<JoinHandle<()>>>,
}

/// The state that [`QemuProtection::finish`] restores in QEMU.
struct Undo {
    changed: Changed,
    disks: Arc<Disks>,
    _directory: SocketDirectory,
}

/// Measurements of a protection. Later versions add fields.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProtectionStatistics {
    /// State and outcome of the primary's state machine.
    pub contact: ContactState<State, Outcome>,
    /// Number of the last checkpoint that the standby holds. 0 before the first.
    pub held: u64,
    /// Whether QEMU's guest is paused now.
    pub is_guest_stopped: bool,
    /// Number of pauses for checkpoints so far.
    pub pauses: u64,
    /// Median of the last thousand pauses. None before the first.
    pub pause_p50: Option<Duration>,
    /// 99th percentile of the last thousand pauses.
    pub pause_p99: Option<Duration>,
    /// Maximum of the last thousand pauses.
    pub pause_most: Option<Duration>,
    /// Duration of the last pause.
    pub pause_last: Option<Duration>,
    /// Waiting and released output of all network cards.
    pub output: GateStatistics,
    /// Time since the last checkpoint became held. None before the first.
    pub held_for: Option<Duration>,
    /// Whether no further checkpoint has become held for several intervals.
    pub hangs: bool,
    /// Bytes of a checkpoint that QEMU has sent and that are not written to the standby yet.
    pub kept_bytes: u64,
    /// The reason why the guest waits for the standby in each checkpoint, although checkpoints should be kept.
    pub waits_because: Option<String>,
    /// Bytes of the stream that were received from QEMU.
    pub stream_bytes: u64,
    /// Time since the protection began.
    pub age: Duration,
    /// The reason why this side has ended the protection by itself: a change of the machine. None otherwise.
    pub ended_because: Option<String>,
    /// The reason why the contact with the standby ended, if it has.
    pub lost_because: Option<String>,
    /// A problem for the operator: a gate or the monitor has failed.
    pub trouble: Option<String>,
}

/// The result of a protection, after QEMU was restored.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProtectionEnd {
    /// The outcome that both sides agree on.
    pub outcome: Outcome,
    /// Whether QEMU's guest runs.
    pub runs_here: bool,
    /// Whether this QEMU can be protected again. False if its migration was cancelled while it was protected.
    pub is_protectable: bool,
    /// Sentences about state that could not be restored.
    pub left: Vec<String>,
}

impl QemuProtection {
    /// Checks all requirements, connects to the standby, adds gates to the network cards, and begins the seeding.
    ///
    /// # Errors
    /// [`DriveError`]. QEMU is unchanged.
    pub fn begin(mut vm: Vm, request: ProtectRequest, claims: Arc<dyn Claims>) -> Result<Self, DriveError> {
        request.check()?;
        let pid = rustix::net::sockopt::socket_peercred(vm.client().socket().as_fd())
            .ok()
            .map(|peer| peer.pid.as_raw_nonzero().get().unsigned_abs());
        let mut fit = check::check(&mut vm, &request, pid)?;
        let channel = reach(&request)?;
        let monitor = Monitor::new(vm)?;
        let guard = Arc::new(Guard::new(monitor, pid, request.checkpoint_delay, request.terms.lease));
        let terms = request.terms;
        let contact = PrimaryContact::begin(
            &channel,
            request.protection,
            terms,
            // QEMU continues to run if this program is killed.
            true,
            &request.secret,
            Arc::clone(&guard) as Arc<dyn sterna_standby::PrimaryGuest>,
            Arc::new(ClaimsOfALivingGuest { guard: Arc::downgrade(&guard), claims }),
        )
        .map_err(|error| not_greeted(&request, error))?;
        channel.set_stall_limit(None);
        guard.set_contact(contact.clone());
        if let Some(disk) = &fit.shared_disk {
            guard.set_shared_disk(disk.clone());
        }
        let undo = match prepare(&guard, &request, &mut fit) {
            Ok(undo) => undo,
            Err(error) => {
                // No checkpoint is held yet, so this ends the protection on both sides.
                let _ = contact.unprotect();
                return Err(error);
            }
        };
        let this = Self {
            guard,
            contact,
            remarks: fit.remarks,
            began: Instant::now(),
            checkpoint_delay: request.checkpoint_delay,
            undo: Mutex::new(Some(undo)),
            is_over: Arc::default(),
            watch: Mutex::default(),
        };
        let started = this
            .watch(terms.lease, fit.nics)
            .and_then(|()| request.watchdog.map_or(Ok(()), |watchdog| this.arm(watchdog)))
            .and_then(|()| this.start());
        if let Err(error) = started {
            let _ = this.contact.unprotect();
            this.contact.wait();
            // The operator must get the first error, not an error of the end.
            let _ = this.finish();
            return Err(error);
        }
        Ok(this)
    }

    /// Arms the watchdog. Called before any checkpoint can be held.
    fn arm(&self, watchdog: Arc<dyn Watchdog>) -> Result<(), DriveError> {
        self.contact.arm(watchdog).map_err(|error| DriveError::Failed(error.to_string()))
    }

    /// A sentence for the operator if checkpoints have stopped.
    fn hang(&self, state: State) -> Option<String> {
        let age = self.contact.held_for().filter(|_| state == State::Protected)?;
        if !checkpoints_hang(age, self.checkpoint_delay) {
            return None;
        }
        let stalled = self.guard.relay().map(Relay::stalled).unwrap_or_default();
        Some(match stalled > age / 2 {
            true => "the standby has stored no checkpoint for some intervals: it is in contact, but does not read the \
                     stream. The guest's output waits"
                .to_owned(),
            false => "the standby has stored no checkpoint for some intervals: QEMU sends none, because it hangs or \
                      its guest cannot be stopped. The guest's output waits, and the standby holds the last \
                      checkpoint: `sterna takeover` there starts the guest"
                .to_owned(),
        })
    }

    fn start(&self) -> Result<(), DriveError> {
        let uri = self.guard.relay().map(Relay::uri);
        let uri = uri.ok_or_else(|| DriveError::Failed("the relay was not set up".to_owned()))?;
        self.guard.monitor.execute("migrate", json!({ "uri": uri }), ANSWER_LIMIT).map(drop)
    }

    /// Starts the thread that reads events. It also ends a seeding if QEMU abandons it or a silent standby blocks it.
    /// After the seeding, the lease detects a silent standby.
    fn watch(&self, lease: Duration, nics: Vec<Nic>) -> Result<(), DriveError> {
        let (guard, contact, is_over) =
            (Arc::clone(&self.guard), self.contact.clone(), Arc::clone(&self.is_over));
        let act = move || {
            let (mut look, mut has_changed) = (Instant::now(), false);
            while !is_over.load(Ordering::Acquire) {
                guard.monitor.pump();
                let is_protected = matches!(contact.state().state, State::Seeding | State::Protected);
                if is_protected && !has_changed && Instant::now() >= look {
                    look = Instant::now() + LOOK_AT_NICS;
                    if let Some(why) = change(&guard.monitor, &nics) {
                        has_changed = true;
                        guard.end_because(why);
                    }
                }
                if is_protected && !has_changed && guard.monitor.seen().was_cancelled {
                    has_changed = true;
                    guard.end_because(CANCELLED.to_owned());
                }
                if is_protected && guard.relay().map(Relay::disk_stalled).unwrap_or_default() > lease {
                    let why = "the standby did not answer QEMU about a disk for longer than the lease";
                    contact.failed(why, Event::ConnectionLost);
                }
                if contact.state().state != State::Seeding {
                    continue;
                }
                let seen = guard.monitor.seen();
                if seen.has_migration_failed {
                    // QEMU may not have connected at all. Then the end of the stream does not report the failure.
                    let why = guard.monitor.why_migration_failed(ANSWER_LIMIT);
                    guard.ended(format!("QEMU's migration to the standby failed: {why}"), false);
                    continue;
                }
                let stands = seen.stands_since.map(|since| since.elapsed());
                let stalled = guard.relay().map(Relay::stalled).unwrap_or_default();
                if stands.unwrap_or_default().max(stalled) > lease {
                    let why = "the standby read nothing for longer than the lease during the seeding";
                    contact.failed(why, Event::ConnectionLost);
                }
            }
        };
        let thread = std::thread::Builder::new().name("protection's monitor".to_owned()).spawn(act);
        let thread = thread.map_err(|error| DriveError::Failed(format!("cannot start a thread: {error}")))?;
        *self.watch.lock() = Some(thread);
        Ok(())
    }

    /// Sentences that the operator should read before the seeding starts.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Ends the protection. The standby is asked for its final answer, and the guest continues here.
    ///
    /// # Errors
    /// The machine refuses: the protection is over, or the standby may have the guest.
    pub fn unprotect(&self) -> Result<(), Refusal> {
        self.contact.unprotect()
    }

    /// Starts a planned takeover: the guest continues at the standby.
    ///
    /// # Errors
    /// The machine's reason for the refusal.
    pub fn hand_over(&self) -> Result<(), Refusal> {
        self.contact.hand_over()
    }

    /// The outcome, if there is one. Until [`QemuProtection::finish`], QEMU is not restored.
    pub fn outcome(&self) -> Option<Outcome> {
        self.contact.state().outcome
    }

    /// Whether QEMU's process has ended, or its monitor is permanently closed. Then this side claims nothing, and
    /// there may be no outcome. End this process, so that the standby takes the guest over.
    pub fn is_qemu_gone(&self) -> bool {
        self.guard.is_qemu_gone()
    }

    /// The present measurements.
    pub fn statistics(&self) -> ProtectionStatistics {
        let seen = self.guard.monitor.seen();
        let (output, ended) =
            self.guard.with_gates(|gates| (gates.statistics(), gates.ended())).unwrap_or_default();
        let contact = self.contact.state();
        let hang = self.hang(contact.state);
        ProtectionStatistics {
            held: self.contact.held(),
            is_guest_stopped: seen.stands_since.is_some(),
            pauses: seen.pause_count,
            pause_p50: seen.pause(500),
            pause_p99: seen.pause(990),
            pause_most: seen.pause(1000),
            pause_last: seen.pauses.back().copied(),
            output,
            kept_bytes: self.guard.relay().map_or(0, Relay::kept_bytes),
            waits_because: self.guard.relay().and_then(Relay::waits_because),
            stream_bytes: self.guard.relay().map_or(0, Relay::bytes),
            age: self.began.elapsed(),
            ended_because: self.guard.ended_because(),
            lost_because: self.guard.lost_because(),
            held_for: self.contact.held_for(),
            hangs: hang.is_some(),
            trouble: seen.gone.or(ended).or(hang),
            contact,
        }
    }

    /// Waits for the outcome, and puts QEMU into the corresponding state. If the guest stays here, QEMU leaves COLO,
    /// and has no gates and the earlier settings. If the standby has the guest, QEMU is ended.
    ///
    /// # Errors
    /// The guest should run here but does not, or QEMU does not answer.
    pub fn finish(&self) -> Result<ProtectionEnd, DriveError> {
        let outcome = self.contact.wait();
        let undo = self.undo.lock().take();
        let done = match outcome {
            // QEMU was ended on purpose, so there is nothing to restore.
            Outcome::Alone(_) if self.guard.is_qemu_gone() => {
                Ok(ProtectionEnd { outcome, runs_here: false, is_protectable: false, left: Vec::new() })
            }
            Outcome::Alone(Because::Never | Because::Claim) | Outcome::Failed(_) => self.stay(outcome, undo),
            Outcome::HandedOver | Outcome::Lost => Ok(self.gone(outcome)),
        };
        self.is_over.store(true, Ordering::Release);
        if let Some(watch) = self.watch.lock().take() {
            // A thread that panicked has ended, too.
            let _ = watch.join();
        }
        done
    }

    /// Restores QEMU with the guest here, unprotected. Each step is tried, even if others fail.
    fn stay(&self, outcome: Outcome, undo: Option<Undo>) -> Result<ProtectionEnd, DriveError> {
        let stays = self.guard.leave();
        let mut left = Vec::new();
        let mut note = |what: &str, done: Result<(), DriveError>| {
            if let Err(error) = done {
                left.push(format!("{what}: {error}"));
            }
        };
        if let Some(gates) = self.guard.take_gates() {
            gates.open();
            note("removing the gates", gates.remove(&self.guard.monitor));
        }
        if let Some(undo) = undo {
            note("removing the disks' children", undo.disks.remove(&self.guard.monitor));
            note("restoring the settings", self.guard.monitor.with(|vm| undo.changed.undo(vm)));
        }
        match stays {
            Ok(migration) => {
                let stays_cancelled = leave::of_migration(&migration);
                let is_protectable = stays_cancelled.is_none();
                left.extend(stays_cancelled);
                Ok(ProtectionEnd { outcome, runs_here: true, is_protectable, left })
            }
            Err(error) if left.is_empty() => Err(error),
            Err(error) => Err(DriveError::Failed(format!("{error}. Besides: {}", left.join("; ")))),
        }
    }

    /// Ends QEMU, because the standby has the guest.
    fn gone(&self, outcome: Outcome) -> ProtectionEnd {
        let mut left = Vec::from_iter(self.guard.left_unsaid());
        if self.guard.monitor.seen().gone.is_none() {
            left.push(
                "QEMU has received `quit` but still answers: its guest is stopped, and must not be started"
                    .to_owned(),
            );
        }
        ProtectionEnd { outcome, runs_here: false, is_protectable: false, left }
    }
}

/// Detects a change of the machine that breaks the protection. Either output is not held back any more, or the
/// devices differ from those of the seeding. QEMU sends no event when a device is plugged, so it is queried.
fn change(monitor: &Monitor, before: &[Nic]) -> Option<String> {
    if let Some(device) = monitor.seen().unplugged {
        return Some(format!("the device {device} was unplugged"));
    }
    let table = monitor.with(|vm| {
        vm.client().set_limit(ANSWER_LIMIT);
        vm.client().human("info network").map_err(|error| vm.error(error))
    });
    // No change is reported for a QEMU that does not answer. The monitor and the lease detect that.
    nics::change(&table.ok()?, before)
}

/// Refuses to claim a guest that has ended, because the standby could then not take it over.
struct ClaimsOfALivingGuest {
    /// Weak, because the guard owns the contact, and the contact owns this.
    guard: Weak<Guard>,
    claims: Arc<dyn Claims>,
}

impl Claims for ClaimsOfALivingGuest {
    fn claim(&self) -> Result<Ruling, String> {
        let guard = self.guard.upgrade().ok_or("the protection was ended")?;
        match guard.monitor.run_state(ANSWER_LIMIT) {
            Err(error) if error.is_disconnect() => Err(format!(
                "{error}: QEMU has ended, so this side does not claim the guest, and the standby may take over"
            )),
            // A claim for a guest that hangs would prevent the standby from starting it. The caller repeats the
            // attempt.
            Err(error) => Err(format!(
                "{error}: QEMU does not answer, so this side does not claim the guest, and the standby may take over"
            )),
            Ok(_) => self.claims.claim(),
        }
    }

    fn arbiter(&self) -> Result<ArbiterIdentity, String> {
        self.claims.arbiter()
    }

    fn look(&self) -> Result<(), String> {
        self.claims.look()
    }

    fn arbiters_compared(&self) {
        self.claims.arbiters_compared();
    }
}

/// Opens the contact's connection to the standby.
fn reach(request: &ProtectRequest) -> Result<Arc<Channel>, DriveError> {
    let at = request.contact.as_ref().unwrap_or(&request.standby);
    let adopt = |channel: Channel| Arc::new(channel);
    let channel = Channel::connect_with(at, request.tls.as_ref(), CONTACT_LIMIT, &request.cancel, adopt);
    let channel = channel.map_err(|error| match request.cancel.is_cancelled() {
        true => DriveError::Cancelled(format!(
            "interrupted while connecting to the standby at {at}; the guest is not protected and continues to run"
        )),
        false => error.into(),
    })?;
    channel.set_stall_limit(Some(CONTACT_LIMIT));
    Ok(channel)
}

/// Sets up gates, relay and settings. If a step fails, the earlier steps are undone.
fn prepare(guard: &Arc<Guard>, request: &ProtectRequest, fit: &mut Fit) -> Result<Undo, DriveError> {
    let monitor = &guard.monitor;
    let left = monitor.with(gates::remove_left_ones)?;
    if left > 0 {
        fit.remarks.push("the gates of a killed `sterna protect` were removed".to_owned());
    }
    if monitor.with(disks::remove_left_ones)? > 0 {
        fit.remarks.push("the disks' children of a killed `sterna protect` were removed".to_owned());
    }
    let refused = |what: &'static str, error| DriveError::file("make", what, error);
    let directory = SocketDirectory::new(request.socket_directory.as_deref())
        .map_err(|error| refused("a directory for sockets", error))?;
    guard.set_sockets(directory.path());
    let steps = Arc::downgrade(&(Arc::clone(guard) as Arc<dyn Steps>));
    let relay = Relay::listen(
        &directory.path().join("stream"),
        request.standby.clone(),
        request.tls.clone(),
        request.channels,
        request.most_kept_bytes,
        steps,
    )
    .map_err(|error| refused("the relay's socket", error))?;
    guard.set_relay(relay);
    let Some(relay) = guard.relay() else { return Err(DriveError::Failed("there is no relay".to_owned())) };
    let goes_on = |copy| match (guard.is_over(), &request.copying) {
        (true, _) => {
            let why = guard.lost_because().unwrap_or_else(|| "no reason is known".to_owned());
            Err(DriveError::Failed(format!("the standby was lost while disks were copied: {why}")))
        }
        (_, Some(hears)) if !hears(copy) => Err(DriveError::Cancelled(
            "cancelled while disks were copied; the guest continues to run here".to_owned(),
        )),
        _ => Ok(()),
    };
    let disks = Arc::new(Disks::attach(monitor, relay, directory.path(), &request.disks, &goes_on)?);
    guard.set_disks(Arc::clone(&disks));
    let undo_disks = |error| {
        // The operator must get `error`, not an error of the removal.
        let _ = disks.remove(monitor);
        error
    };
    let gates =
        Gates::install(monitor, &fit.nics, directory.path(), request.most_waiting_bytes, &guard.may_say());
    let gates = gates.map_err(undo_disks)?;
    let changed = monitor
        .with(|vm| fit.settings.change(vm, &check::capabilities(request), &check::parameters(request)));
    let changed = match changed {
        Ok(changed) => changed,
        Err(error) => {
            // The operator must get the refusal, not an error of the removal.
            let _ = gates.remove(monitor);
            return Err(undo_disks(error));
        }
    };
    guard.set_gates(gates);
    Ok(Undo { changed, disks, _directory: directory })
}

fn not_greeted(request: &ProtectRequest, error: ContactError) -> DriveError {
    let at = request.contact.as_ref().unwrap_or(&request.standby);
    DriveError::Failed(format!(
        "the standby at {at} sent no greeting: {error}; QEMU's earlier settings are restored"
    ))
}
