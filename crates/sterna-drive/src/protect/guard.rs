//! Performs the actions of the contact's state machine at a QEMU and at its gates.

mod end;
mod last;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde_json::{Value, json};
use sterna::VmError;
use sterna_standby::machines::primary::{Event, Refusal};
use sterna_standby::{PrimaryContact, PrimaryGuest};

use super::disks::Disks;
use super::gates::Gates;
use super::leave::{self, LEAVE_LIMIT};
use super::monitor::Monitor;
use super::relay::{Relay, Steps};
use crate::error::DriveError;

/// How long QEMU may take to answer a `stop` of its guest. The command is repeated after that.
const STOP_LIMIT: Duration = Duration::from_secs(2);
/// Time limit for the last checkpoint of a planned takeover to begin, and again to be held.
const LAST_LIMIT: Duration = Duration::from_secs(30);
/// Interval between two checks of a condition.
const LOOK: Duration = Duration::from_millis(20);
/// Interval between two requests for a checkpoint. QEMU ignores a request that arrives during a checkpoint.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// A QEMU with its relay and its gates.
pub(super) struct Guard {
    pub(super) monitor: Monitor,
    contact: Arc<OnceLock<PrimaryContact>>,
    relay: OnceLock<Relay>,
    gates: Mutex<Option<Gates>>,
    /// A directory in which QEMU can create sockets.
    sockets: OnceLock<PathBuf>,
    /// The reason why the contact ended.
    lost_because: OnceLock<String>,
    /// The reason why this side has ended the protection by itself.
    ended_because: OnceLock<String>,
    /// The name of a disk that both hosts share.
    shared_disk: OnceLock<String>,
    /// The disks that QEMU also writes at the standby.
    disks: OnceLock<Arc<Disks>>,
    /// A sentence about output of the last checkpoint that did not leave.
    left_unsaid: OnceLock<String>,
    delay_ms: u64,
    lease: Duration,
    /// This side is ending QEMU, because the standby has the guest.
    is_destroying: AtomicBool,
    last: Mutex<Last>,
    changed: Condvar,
    /// Locked while a thread stops or starts the guest, so that these do not overlap.
    hand: Mutex<()>,
    /// A pidfd of QEMU's process, if it can be watched.
    process: Option<OwnedFd>,
}

/// Progress of the last checkpoint of a planned takeover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    NotWanted,
    /// The next checkpoint is the last one.
    Wanted,
    /// The checkpoint with this number is the last one. It may not be taken yet.
    Due(u64),
    /// The checkpoint with this number is the last one. It may be taken.
    Granted(u64),
    /// The last checkpoint is held. QEMU does not get the answer, so that its guest stays paused.
    Stands,
}

impl Guard {
    /// `pid`: the id of QEMU's process, if known.
    pub(super) fn new(monitor: Monitor, pid: Option<u32>, delay: Duration, lease: Duration) -> Self {
        Self {
            monitor,
            contact: Arc::default(),
            relay: OnceLock::new(),
            gates: Mutex::default(),
            sockets: OnceLock::new(),
            lost_because: OnceLock::new(),
            ended_because: OnceLock::new(),
            shared_disk: OnceLock::new(),
            disks: OnceLock::new(),
            left_unsaid: OnceLock::new(),
            delay_ms: delay.as_millis() as u64,
            lease,
            is_destroying: AtomicBool::new(false),
            last: Mutex::new(Last::NotWanted),
            changed: Condvar::new(),
            hand: Mutex::default(),
            process: pid.and_then(end::watched),
        }
    }

    pub(super) fn set_contact(&self, contact: PrimaryContact) {
        // The contact is created once, so this cannot fail.
        let _ = self.contact.set(contact);
    }

    /// Records that the guest writes a disk that both hosts share.
    pub(super) fn set_shared_disk(&self, disk: String) {
        let _ = self.shared_disk.set(disk);
    }

    /// Sets the directory in which QEMU can create sockets.
    pub(super) fn set_sockets(&self, directory: &Path) {
        let _ = self.sockets.set(directory.to_owned());
    }

    pub(super) fn set_disks(&self, disks: Arc<Disks>) {
        let _ = self.disks.set(disks);
    }

    pub(super) fn set_relay(&self, relay: Relay) {
        let _ = self.relay.set(relay);
    }

    pub(super) fn set_gates(&self, gates: Gates) {
        *self.gates.lock() = Some(gates);
    }

    pub(super) fn relay(&self) -> Option<&Relay> {
        self.relay.get()
    }

    pub(super) fn with_gates<T>(&self, act: impl FnOnce(&Gates) -> T) -> Option<T> {
        self.gates.lock().as_ref().map(act)
    }

    pub(super) fn take_gates(&self) -> Option<Gates> {
        self.gates.lock().take()
    }

    /// The reason why the contact ended, if it has.
    pub(super) fn lost_because(&self) -> Option<String> {
        self.lost_because.get().cloned()
    }

    /// Ends the protection for the reason `why`. The guest stays here.
    pub(super) fn end_because(&self, why: String) {
        self.ended_because.get_or_init(|| why);
        if let Some(contact) = self.contact.get() {
            // The machine refuses if it is already ending.
            let _ = contact.unprotect();
        }
    }

    /// The reason why this side has ended the protection by itself, if it has.
    pub(super) fn ended_because(&self) -> Option<String> {
        self.ended_because.get().cloned()
    }

    /// A sentence about output of the last checkpoint that did not leave, if any.
    pub(super) fn left_unsaid(&self) -> Option<String> {
        self.left_unsaid.get().cloned()
    }

    /// A check whether the output of a gate's epoch may leave.
    /// A gate's epoch 1 is the output before the seeding is held.
    pub(super) fn may_say(&self) -> Arc<dyn Fn(u64) -> bool + Send + Sync> {
        let contact = Arc::clone(&self.contact);
        Arc::new(move |epoch| contact.get().is_some_and(|contact| contact.may_say(epoch.saturating_sub(1))))
    }

    /// Takes QEMU out of COLO, and makes its guest run. Also ends a migration that failed or was cancelled. Returns
    /// the migration's state.
    ///
    /// # Errors
    /// The guest does not run afterwards.
    pub(super) fn leave(&self) -> Result<String, DriveError> {
        let _hand = self.hand.lock();
        let mut ask = |command: &str, arguments| self.monitor.execute(command, arguments, LEAVE_LIMIT);
        leave::leave(&mut ask, self.sockets.get().map(PathBuf::as_path))
    }

    /// Requests an immediate checkpoint from QEMU: setting the parameter, even to the same value, triggers one.
    fn ask_for_checkpoint(&self) -> Result<(), DriveError> {
        let same = json!({ "x-checkpoint-delay": self.delay_ms });
        self.monitor.execute("migrate-set-parameters", same, STOP_LIMIT).map(drop)
    }

    /// Stops the guest permanently. QEMU's stream is closed first, so that no answer can resume the guest.
    fn stop_for_good(&self) -> Result<(), DriveError> {
        let _hand = self.hand.lock();
        if let Some(relay) = self.relay.get() {
            relay.close_qemu();
        }
        if self.monitor.seen().gone.is_some() {
            return Ok(());
        }
        // Until COLO has ended, a LOADED that QEMU has read, or that is in its socket, can resume the guest.
        self.monitor.execute("stop", Value::Null, STOP_LIMIT)?;
        if !self.monitor.wait(Duration::ZERO, |seen| seen.colo_exits > 0) {
            // Between checkpoints QEMU does not notice the closed stream until the next one is due.
            self.ask_for_checkpoint()?;
            let has_left = self.monitor.wait(STOP_LIMIT, |seen| seen.colo_exits > 0 || seen.gone.is_some());
            if !has_left {
                return Err(DriveError::Failed("QEMU does not leave COLO".to_owned()));
            }
        }
        self.monitor.execute("stop", Value::Null, STOP_LIMIT)?;
        match self.monitor.run_state(STOP_LIMIT)?.as_str() {
            "running" => {
                Err(DriveError::Failed("QEMU's guest runs although QEMU was told to stop it".to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Whether the contact has an outcome.
    pub(super) fn is_over(&self) -> bool {
        self.contact.get().is_none_or(|contact| contact.state().outcome.is_some())
    }

    /// Waits until the last checkpoint has reached a step.
    fn wait_for<T>(
        &self,
        what: &str,
        mut look: impl FnMut(Last) -> Option<T>,
        mut meanwhile: impl FnMut(),
    ) -> Result<T, VmError> {
        let until = Instant::now() + LAST_LIMIT;
        loop {
            let mut last = self.last.lock();
            if let Some(found) = look(*last) {
                return Ok(found);
            }
            if self.is_over() || Instant::now() >= until {
                return Err(VmError::new(
                    "the last checkpoint",
                    format!("QEMU did not reach {what} of the checkpoint"),
                ));
            }
            self.changed.wait_for(&mut last, ASK_AGAIN);
            drop(last);
            meanwhile();
        }
    }
}

impl Guard {
    /// Whether QEMU has ended without our request.
    pub(super) fn is_qemu_gone(&self) -> bool {
        self.monitor.seen().gone.is_some() && !self.is_destroying.load(Ordering::SeqCst)
    }
}

impl PrimaryGuest for Guard {
    fn stop(&self) -> Result<(), VmError> {
        self.stop_for_good().or_else(|error| match error.is_disconnect() {
            // QEMU's process has ended, and the guest with it.
            true => Ok(()),
            false => Err(VmError::new("stopping QEMU's guest", error)),
        })
    }

    fn resume(&self) -> Result<(), VmError> {
        self.leave().map(drop).map_err(|error| VmError::new("starting QEMU's guest again", error))
    }

    fn destroy(&self) {
        if self.monitor.seen().gone.is_some() {
            return;
        }
        self.is_destroying.store(true, Ordering::SeqCst);
        let _hand = self.hand.lock();
        // The guest is paused, and its output is dropped. A QEMU that does not answer is left to the fence.
        if let Err(error) = self.monitor.execute("quit", Value::Null, STOP_LIMIT)
            && !error.is_disconnect()
        {
            // The caller that reports the outcome says that the process may still exist.
            return;
        }
        self.monitor.wait(LEAVE_LIMIT, |seen| seen.gone.is_some());
    }

    fn close_channels(&self) {
        // A trouble that occurs after this point is a consequence of closing the channels.
        let trouble = || self.contact.get().and_then(|contact| contact.state().trouble);
        // A relay that ends closes the standby's connections, which ends the contact. So its reason is the cause.
        let why = self.relay.get().and_then(Relay::ended_because).or_else(trouble);
        let why = why.unwrap_or_else(|| "the standby did not answer for as long as the lease".to_owned());
        self.lost_because.get_or_init(|| why);
        if let Some(relay) = self.relay.get() {
            relay.close();
        }
    }

    fn take_last_checkpoint(&self, taken: &dyn Fn(u64)) -> Result<(), VmError> {
        *self.last.lock() = Last::Wanted;
        let ask = || {
            // A failed request is repeated below.
            let _ = self.ask_for_checkpoint();
        };
        ask();
        let due = |last| match last {
            Last::Due(number) => Some(number),
            _ => None,
        };
        let number = self.wait_for("its beginning", due, ask)?;
        taken(number);
        *self.last.lock() = Last::Granted(number);
        self.changed.notify_all();
        self.wait_for("its end", |last| (last == Last::Stands).then_some(()), || ())?;
        self.stop()
    }

    fn release(&self, epoch: u64) {
        self.with_gates(|gates| gates.release(epoch + 1));
        // `last` is locked before the notification. So a thread that waits for room for the next checkpoint has
        // either not checked yet, or is woken.
        let is_last = matches!(*self.last.lock(), Last::Granted(last) if last == epoch)
            || *self.last.lock() == Last::Stands;
        self.changed.notify_all();
        if is_last {
            self.deliver_last(epoch + 1);
        }
    }

    fn open_gate(&self) {
        self.with_gates(Gates::open);
    }

    fn drop_output(&self) {
        self.with_gates(Gates::drop_waiting);
    }
}

impl Steps for Guard {
    fn ready(&self) {
        self.with_gates(Gates::close);
    }

    fn reply(&self, number: u64) -> Result<(), String> {
        let Some(contact) = self.contact.get() else { return Err("there is no contact".to_owned()) };
        let mut last = self.last.lock();
        loop {
            if self.is_over() {
                return Err("the protection has ended".to_owned());
            }
            match *last {
                Last::Wanted => {
                    *last = Last::Due(number);
                    self.changed.notify_all();
                }
                Last::Granted(granted) if granted == number => return Ok(()),
                Last::Due(_) | Last::Granted(_) | Last::Stands => {}
                Last::NotWanted => match contact.checkpoint_taken(number) {
                    Ok(()) => return Ok(()),
                    Err(Refusal::TooManyInFlight { .. }) => {}
                    Err(refusal) => return Err(refusal.to_string()),
                },
            }
            self.changed.wait_for(&mut last, LOOK);
        }
    }

    fn may_answer(&self, number: u64) -> bool {
        // After the last checkpoint of a planned takeover the guest must not continue here.
        *self.last.lock() != Last::Granted(number)
    }

    fn received(&self, number: u64) -> bool {
        self.with_gates(Gates::end_epoch);
        let mut last = self.last.lock();
        let is_last = *last == Last::Granted(number);
        if is_last {
            *last = Last::Stands;
            self.changed.notify_all();
        }
        // QEMU resumes its guest when it reads LOADED. The lease may have ended while the guest was stopped.
        !is_last && self.contact.get().is_some_and(PrimaryContact::may_guest_run)
    }

    fn check_disks(&self) -> Result<(), String> {
        self.disks.get().map_or(Ok(()), |disks| disks.check(&self.monitor).map_err(|error| error.to_string()))
    }

    fn qemu_ended(&self) {
        self.tell_of_end();
    }

    fn ended(&self, why: String, is_standbys_fault: bool) {
        let event = if is_standbys_fault { Event::PeerMisbehaved } else { Event::ConnectionLost };
        let Some(contact) = self.contact.get() else { return };
        // After the last checkpoint the standby may close its connections. That is no failure.
        if *self.last.lock() == Last::Stands {
            return;
        }
        if contact.is_over_after_last_word() {
            return;
        }
        // Store the reason first, because the end of the contact that follows would hide it.
        self.lost_because.get_or_init(|| why.clone());
        contact.failed(why, event);
    }
}
