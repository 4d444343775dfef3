//! The handle of a protection.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::json;
use sterna::replica::machines::Ruling;
use sterna::replica::machines::primary::{Because, Event, Outcome, Refusal, State};
use sterna::replica::{ArbiterIdentity, Claims, ContactError, ContactState, PrimaryContact};
use sterna_transport::{CancelFlag, Channel};

use super::check::{self, Fit};
use super::disks::{self, Disks};
use super::gate::GateStatistics;
use super::gates::{self, Gates};
use super::guard::Guard;
use super::monitor::Monitor;
use super::nics::{self, Nic};
use super::relay::{Relay, Steps};
use super::request::ProtectRequest;
use super::sockets::SocketDirectory;
use crate::drive::error::DriveError;
use crate::drive::settings::Changed;
use crate::drive::vm::{ANSWER_LIMIT, Vm};

/// How long the standby may take to be reached and to greet.
const CONTACT_LIMIT: Duration = Duration::from_secs(10);

/// Between two looks at the network cards.
const LOOK_AT_NICS: Duration = Duration::from_millis(50);

/// A protection that goes on. Call [`QemuProtection::finish`] when it has an outcome: QEMU is as it was only then.
///
/// Dropped before, it goes on for as long as this process does. A process that ends without it leaves QEMU in COLO and without network,
/// its guest running or not, and the standby may take the guest over.
pub struct QemuProtection {
    guard: Arc<Guard>,
    contact: PrimaryContact,
    remarks: Vec<String>,
    began: Instant,
    undo: Mutex<Option<Undo>>,
    is_over: Arc<AtomicBool>,
    watch: Mutex<Option<JoinHandle<()>>>,
}

/// What is put back.
struct Undo {
    changed: Changed,
    disks: Arc<Disks>,
    _directory: SocketDirectory,
}

/// What a protection measures. Later versions add fields.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProtectionStatistics {
    /// Where the primary stands.
    pub contact: ContactState<State, Outcome>,
    /// The last checkpoint that the standby holds; 0 before the first.
    pub held: u64,
    /// Whether QEMU's guest stands now.
    pub is_guest_stopped: bool,
    /// Pauses for checkpoints so far.
    pub pauses: u64,
    /// The pause that half of the last thousand did not exceed; none before the first.
    pub pause_p50: Option<Duration>,
    /// The pause that 99 of a hundred did not exceed.
    pub pause_p99: Option<Duration>,
    /// What waits at all network cards, and what left.
    pub output: GateStatistics,
    /// Bytes of the stream that were handed to the standby.
    pub stream_bytes: u64,
    /// Since it began.
    pub age: Duration,
    /// Why this side has ended the protection by itself, if it has: the machine has changed.
    pub ended_because: Option<String>,
    /// Why the contact with the standby ended, if it has.
    pub lost_because: Option<String>,
    /// What an operator should look at: a gate, or the monitor, that has gone.
    pub trouble: Option<String>,
}

/// How it ended, when QEMU was seen to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProtectionEnd {
    /// The outcome.
    pub outcome: Outcome,
    /// Whether QEMU's guest runs.
    pub runs_here: bool,
    /// What could not be put back, as sentences.
    pub left: Vec<String>,
}

impl QemuProtection {
    /// Checks everything, greets the standby, puts gates at the network cards, and begins the seeding.
    ///
    /// # Errors
    /// [`DriveError`]; QEMU is as it was.
    pub fn begin(mut vm: Vm, request: ProtectRequest, claims: Arc<dyn Claims>) -> Result<Self, DriveError> {
        request.check()?;
        let pid = rustix::net::sockopt::socket_peercred(vm.client().socket().as_fd())
            .ok()
            .map(|peer| peer.pid.as_raw_nonzero().get().unsigned_abs());
        let mut fit = check::check(&mut vm, &request, pid)?;
        let channel = reach(&request)?;
        let monitor = Monitor::new(vm)?;
        let guard = Arc::new(Guard::new(monitor, request.checkpoint_delay, request.terms.lease));
        let terms = request.terms;
        let contact = PrimaryContact::begin(
            &channel,
            request.protection,
            terms,
            // QEMU runs on if this program is killed.
            true,
            &request.secret,
            Arc::clone(&guard) as Arc<dyn sterna::replica::PrimaryGuest>,
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
                // Nothing is held yet, so this ends it at both sides.
                let _ = contact.unprotect();
                return Err(error);
            }
        };
        let this = Self {
            guard,
            contact,
            remarks: fit.remarks,
            began: Instant::now(),
            undo: Mutex::new(Some(undo)),
            is_over: Arc::default(),
            watch: Mutex::default(),
        };
        let started = this.watch(terms.lease, fit.nics).and_then(|()| this.start());
        if let Err(error) = started {
            let _ = this.contact.unprotect();
            this.contact.wait();
            // The first error is what the operator must hear.
            let _ = this.finish();
            return Err(error);
        }
        Ok(this)
    }

    fn start(&self) -> Result<(), DriveError> {
        let uri = self.guard.relay().map(Relay::uri);
        let uri = uri.ok_or_else(|| DriveError::Failed("the relay was not set up".to_owned()))?;
        self.guard.monitor.execute("migrate", json!({ "uri": uri }), ANSWER_LIMIT).map(drop)
    }

    /// Takes events, and ends a seeding that QEMU gives up or that a silent standby holds up. Afterwards the lease does that.
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
                if is_protected && guard.relay().map(Relay::disk_stalled).unwrap_or_default() > lease {
                    let why = "the standby did not answer QEMU about a disk for longer than the lease";
                    contact.failed(why, Event::ConnectionLost);
                }
                if contact.state().state != State::Seeding {
                    continue;
                }
                let seen = guard.monitor.seen();
                if seen.has_migration_failed {
                    // It may not have connected: then no stream ends.
                    let why = guard.monitor.why_migration_failed(ANSWER_LIMIT);
                    guard.ended(format!("QEMU's migration to the standby failed: {why}"), false);
                    continue;
                }
                let stands = seen.stands_since.map(|since| since.elapsed());
                let stalled = guard.relay().map(Relay::stalled).unwrap_or_default();
                if stands.unwrap_or_default().max(stalled) > lease {
                    let why = "the standby took nothing for longer than the lease while it was seeded";
                    contact.failed(why, Event::ConnectionLost);
                }
            }
        };
        let thread = std::thread::Builder::new().name("protection's monitor".to_owned()).spawn(act);
        let thread =
            thread.map_err(|error| DriveError::Failed(format!("the host refuses a thread: {error}")))?;
        *self.watch.lock() = Some(thread);
        Ok(())
    }

    /// What an operator should know before anything moves, as sentences.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Ends the protection: the standby is asked for its last word, and the guest runs on here.
    ///
    /// # Errors
    /// The machine's refusal: it is over, or the standby may have the guest.
    pub fn unprotect(&self) -> Result<(), Refusal> {
        self.contact.unprotect()
    }

    /// Hands the guest over to the standby as planned.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn hand_over(&self) -> Result<(), Refusal> {
        self.contact.hand_over()
    }

    /// How it ended, if it has. QEMU may not have been seen to: [`QemuProtection::finish`].
    pub fn outcome(&self) -> Option<Outcome> {
        self.contact.state().outcome
    }

    /// Whether QEMU's process has ended, or its monitor is out of reach for good. Then this side claims nothing, and there may be no
    /// outcome: end this process, so that the standby takes the guest over.
    pub fn is_qemu_gone(&self) -> bool {
        self.guard.is_qemu_gone()
    }

    /// What it measures, now.
    pub fn statistics(&self) -> ProtectionStatistics {
        let seen = self.guard.monitor.seen();
        let (output, ended) =
            self.guard.with_gates(|gates| (gates.statistics(), gates.ended())).unwrap_or_default();
        let contact = self.contact.state();
        ProtectionStatistics {
            held: self.contact.held(),
            is_guest_stopped: seen.stands_since.is_some(),
            pauses: seen.pause_count,
            pause_p50: seen.pause(500),
            pause_p99: seen.pause(990),
            output,
            stream_bytes: self.guard.relay().map_or(0, Relay::bytes),
            age: self.began.elapsed(),
            ended_because: self.guard.ended_because(),
            lost_because: self.guard.lost_because(),
            trouble: seen.gone.or(ended),
            contact,
        }
    }

    /// Waits for the outcome, and puts QEMU into the state that belongs to it: out of COLO, without gates, as it was set before; or
    /// ended, where the standby has the guest.
    ///
    /// # Errors
    /// The guest should run here and does not, or QEMU does not answer.
    pub fn finish(&self) -> Result<ProtectionEnd, DriveError> {
        let outcome = self.contact.wait();
        let undo = self.undo.lock().take();
        let done = match outcome {
            Outcome::Alone(Because::Never | Because::Claim) | Outcome::Failed(_) => self.stay(outcome, undo),
            Outcome::HandedOver | Outcome::Lost => Ok(self.gone(outcome)),
        };
        self.is_over.store(true, Ordering::Release);
        if let Some(watch) = self.watch.lock().take() {
            // One that panicked has ended, too.
            let _ = watch.join();
        }
        done
    }

    /// The guest runs here, unprotected.
    fn stay(&self, outcome: Outcome, undo: Option<Undo>) -> Result<ProtectionEnd, DriveError> {
        self.guard.leave()?;
        let mut left = Vec::new();
        let mut note = |what: &str, done: Result<(), DriveError>| {
            if let Err(error) = done {
                left.push(format!("{what}: {error}"));
            }
        };
        if let Some(gates) = self.guard.take_gates() {
            gates.open();
            note("taking the gates away", gates.remove(&self.guard.monitor));
        }
        if let Some(undo) = undo {
            note("taking the disks' children away", undo.disks.remove(&self.guard.monitor));
            note("putting the settings back", self.guard.monitor.with(|vm| undo.changed.undo(vm)));
        }
        Ok(ProtectionEnd { outcome, runs_here: true, left })
    }

    /// The standby has the guest.
    fn gone(&self, outcome: Outcome) -> ProtectionEnd {
        let mut left = Vec::from_iter(self.guard.left_unsaid());
        if self.guard.monitor.seen().gone.is_none() {
            left.push(
                "QEMU was told to quit and still answers: its guest is stopped, and must not be started"
                    .to_owned(),
            );
        }
        ProtectionEnd { outcome, runs_here: false, left }
    }
}

/// Whether the machine has changed so that its output is not held back any more, or its checkpoints are not those of the guest that was
/// seeded. QEMU tells nobody that a device was plugged, so it is asked.
fn change(monitor: &Monitor, before: &[Nic]) -> Option<String> {
    if let Some(device) = monitor.seen().unplugged {
        return Some(format!("the device {device} was unplugged"));
    }
    let table = monitor.with(|vm| {
        vm.client().set_limit(ANSWER_LIMIT);
        vm.client().human("info network").map_err(|error| vm.error(error))
    });
    // One that does not answer is seen to elsewhere.
    nics::change(&table.ok()?, before)
}

/// Whoever has no guest does not claim one: the standby would have nothing to take over.
struct ClaimsOfALivingGuest {
    /// It has the contact, which has this.
    guard: Weak<Guard>,
    claims: Arc<dyn Claims>,
}

impl Claims for ClaimsOfALivingGuest {
    fn claim(&self) -> Result<Ruling, String> {
        let guard = self.guard.upgrade().ok_or("the protection was given up")?;
        match guard.monitor.run_state(ANSWER_LIMIT) {
            Err(error) if error.is_disconnect() => Err(format!(
                "{error}: QEMU has ended, so nothing is claimed here, and the standby may take its guest over"
            )),
            _ => self.claims.claim(),
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

/// Connects to the standby for the contact.
fn reach(request: &ProtectRequest) -> Result<Arc<Channel>, DriveError> {
    let at = request.contact.as_ref().unwrap_or(&request.standby);
    let adopt = |channel: Channel| Arc::new(channel);
    let channel = Channel::connect_with(at, request.tls.as_ref(), CONTACT_LIMIT, &CancelFlag::new(), adopt)?;
    channel.set_stall_limit(Some(CONTACT_LIMIT));
    Ok(channel)
}

/// Gates, relay and settings. What was done is undone if a later step fails.
fn prepare(guard: &Arc<Guard>, request: &ProtectRequest, fit: &mut Fit) -> Result<Undo, DriveError> {
    let monitor = &guard.monitor;
    let left = monitor.with(gates::remove_left_ones)?;
    if left > 0 {
        fit.remarks.push("gates of a protection whose program was killed were taken away".to_owned());
    }
    if monitor.with(disks::remove_left_ones)? > 0 {
        fit.remarks
            .push("disks' children of a protection whose program was killed were taken away".to_owned());
    }
    let refused = |what: &'static str, error| DriveError::file("make", what, error);
    let directory = SocketDirectory::new(request.socket_directory.as_deref())
        .map_err(|error| refused("a directory for sockets", error))?;
    let steps = Arc::downgrade(&(Arc::clone(guard) as Arc<dyn Steps>));
    let relay = Relay::listen(
        &directory.path().join("stream"),
        request.standby.clone(),
        request.tls.clone(),
        request.channels,
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
        (_, Some(hears)) if !hears(copy) => {
            Err(DriveError::Cancelled("cancelled while disks were copied; the guest runs on here".to_owned()))
        }
        _ => Ok(()),
    };
    let disks = Arc::new(Disks::attach(monitor, relay, directory.path(), &request.disks, &goes_on)?);
    guard.set_disks(Arc::clone(&disks));
    let undo_disks = |error| {
        // The error is what the operator must hear.
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
            // The refusal is what the operator must hear.
            let _ = gates.remove(monitor);
            return Err(undo_disks(error));
        }
    };
    guard.set_gates(gates);
    Ok(Undo { changed, disks, _directory: directory })
}

fn not_greeted(request: &ProtectRequest, error: ContactError) -> DriveError {
    let at = request.contact.as_ref().unwrap_or(&request.standby);
    DriveError::Failed(format!("the standby at {at} did not greet: {error}; QEMU is as it was"))
}
