//! What the contact's machine does to a QEMU and to its output.

mod last;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde_json::{Value, json};
use sterna::VmError;
use sterna::replica::machines::primary::{Event, Refusal};
use sterna::replica::{PrimaryContact, PrimaryGuest};

use super::disks::Disks;
use super::gates::Gates;
use super::monitor::Monitor;
use super::relay::{Relay, Steps};
use crate::drive::error::DriveError;

/// How long QEMU may take to answer when its guest is to be stopped; it is asked again then.
const STOP_LIMIT: Duration = Duration::from_secs(2);
/// How long QEMU may take to leave COLO.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);
/// How long the last checkpoint of a planned takeover may take to begin, and then to be held.
const LAST_LIMIT: Duration = Duration::from_secs(30);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);
/// Between two requests for a checkpoint: one that comes while another is taken is forgotten by QEMU.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// A QEMU, its stream and its gates.
pub(super) struct Guard {
    pub(super) monitor: Monitor,
    contact: Arc<OnceLock<PrimaryContact>>,
    relay: OnceLock<Relay>,
    gates: Mutex<Option<Gates>>,
    /// Why the contact ended.
    lost_because: OnceLock<String>,
    /// Why this side has ended the protection by itself.
    ended_because: OnceLock<String>,
    /// A disk that both hosts share.
    shared_disk: OnceLock<String>,
    /// Those that QEMU writes at the standby, too.
    disks: OnceLock<Arc<Disks>>,
    /// What of the last checkpoint's output did not leave, as a sentence.
    left_unsaid: OnceLock<String>,
    delay_ms: u64,
    lease: Duration,
    /// The standby has the guest: QEMU is ended from here.
    is_destroying: AtomicBool,
    last: Mutex<Last>,
    changed: Condvar,
    /// Held by who stops the guest or starts it.
    hand: Mutex<()>,
}

/// The last checkpoint of a planned takeover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    NotWanted,
    /// The next one is to be it.
    Wanted,
    /// This is it, and it waits to be taken.
    Due(u64),
    /// It may be taken.
    Granted(u64),
    /// It is held, and QEMU does not hear of it: its guest stands.
    Stands,
}

impl Guard {
    pub(super) fn new(monitor: Monitor, delay: Duration, lease: Duration) -> Self {
        Self {
            monitor,
            contact: Arc::default(),
            relay: OnceLock::new(),
            gates: Mutex::default(),
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
        }
    }

    pub(super) fn set_contact(&self, contact: PrimaryContact) {
        // Set once, where it is made.
        let _ = self.contact.set(contact);
    }

    /// The guest writes a disk that both hosts share.
    pub(super) fn set_shared_disk(&self, disk: String) {
        let _ = self.shared_disk.set(disk);
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

    /// Why the contact ended, if it has.
    pub(super) fn lost_because(&self) -> Option<String> {
        self.lost_because.get().cloned()
    }

    /// Ends the protection with the guest here, for that reason.
    pub(super) fn end_because(&self, why: String) {
        self.ended_because.get_or_init(|| why);
        if let Some(contact) = self.contact.get() {
            // Refused if it ends already.
            let _ = contact.unprotect();
        }
    }

    /// Why this side has ended the protection by itself, if it has.
    pub(super) fn ended_because(&self) -> Option<String> {
        self.ended_because.get().cloned()
    }

    /// What of the last checkpoint's output did not leave.
    pub(super) fn left_unsaid(&self) -> Option<String> {
        self.left_unsaid.get().cloned()
    }

    /// Whether what the guest said in an epoch of a gate's may leave. A gate's first epoch is before the seeding is held.
    pub(super) fn may_say(&self) -> Arc<dyn Fn(u64) -> bool + Send + Sync> {
        let contact = Arc::clone(&self.contact);
        Arc::new(move |epoch| contact.get().is_some_and(|contact| contact.may_say(epoch.saturating_sub(1))))
    }

    /// Takes QEMU out of COLO, and out of a migration that has failed, with its guest running.
    ///
    /// # Errors
    /// The guest does not run.
    pub(super) fn leave(&self) -> Result<(), DriveError> {
        let _hand = self.hand.lock();
        let until = Instant::now() + LEAVE_LIMIT;
        loop {
            match self.monitor.migration(LEAVE_LIMIT)?.as_str() {
                // Refused just before COLO begins; the next look sees it.
                "colo" => drop(self.monitor.execute("x-colo-lost-heartbeat", Value::Null, LEAVE_LIMIT)),
                "" | "none" | "completed" | "failed" | "cancelled" => break,
                _ => {}
            }
            if Instant::now() >= until {
                break;
            }
            std::thread::sleep(LOOK);
        }
        while Instant::now() < until {
            match self.monitor.run_state(LEAVE_LIMIT)?.as_str() {
                "running" => return Ok(()),
                // It was stopped here; after a failed migration QEMU resumes it by itself, perhaps in a moment.
                "paused" | "postmigrate" | "finish-migrate" => {
                    drop(self.monitor.execute("cont", Value::Null, LEAVE_LIMIT));
                }
                _ => {}
            }
            std::thread::sleep(LOOK);
        }
        let (migration, state) = (self.monitor.migration(LEAVE_LIMIT)?, self.monitor.run_state(LEAVE_LIMIT)?);
        Err(DriveError::Failed(format!(
            "QEMU's guest does not run: its state is `{state}`, its migration's `{migration}`"
        )))
    }

    /// Asks QEMU for a checkpoint at once.
    fn ask_for_checkpoint(&self) -> Result<(), DriveError> {
        let same = json!({ "x-checkpoint-delay": self.delay_ms });
        self.monitor.execute("migrate-set-parameters", same, STOP_LIMIT).map(drop)
    }

    /// Stops the guest for good: first nothing may come any more that starts it again.
    fn stop_for_good(&self) -> Result<(), DriveError> {
        let _hand = self.hand.lock();
        if let Some(relay) = self.relay.get() {
            relay.close_qemu();
        }
        if self.monitor.seen().gone.is_some() {
            return Ok(());
        }
        // A LOADED that QEMU has read, or has in its socket, starts it again; until COLO has ended.
        self.monitor.execute("stop", Value::Null, STOP_LIMIT)?;
        if !self.monitor.wait(Duration::ZERO, |seen| seen.colo_exits > 0) {
            // Between checkpoints QEMU notices nothing until the next one is due.
            self.ask_for_checkpoint()?;
            let has_left = self.monitor.wait(STOP_LIMIT, |seen| seen.colo_exits > 0 || seen.gone.is_some());
            if !has_left {
                return Err(DriveError::Failed("QEMU does not leave COLO".to_owned()));
            }
        }
        self.monitor.execute("stop", Value::Null, STOP_LIMIT)?;
        match self.monitor.run_state(STOP_LIMIT)?.as_str() {
            "running" => Err(DriveError::Failed("QEMU's guest runs although it was told to stop".to_owned())),
            _ => Ok(()),
        }
    }

    /// Whether the contact has an outcome.
    pub(super) fn is_over(&self) -> bool {
        self.contact.get().is_none_or(|contact| contact.state().outcome.is_some())
    }

    /// Waits for a step of the last checkpoint.
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
                return Err(VmError::new("the last checkpoint", format!("it did not come to {what}")));
            }
            self.changed.wait_for(&mut last, ASK_AGAIN);
            drop(last);
            meanwhile();
        }
    }
}

impl Guard {
    /// Whether QEMU has ended by itself.
    pub(super) fn is_qemu_gone(&self) -> bool {
        self.monitor.seen().gone.is_some() && !self.is_destroying.load(Ordering::SeqCst)
    }
}

impl PrimaryGuest for Guard {
    fn stop(&self) -> Result<(), VmError> {
        self.stop_for_good().or_else(|error| match error.is_disconnect() {
            // Its process has ended, and the guest with it.
            true => Ok(()),
            false => Err(VmError::new("stopping QEMU's guest", error)),
        })
    }

    fn resume(&self) -> Result<(), VmError> {
        self.leave().map_err(|error| VmError::new("starting QEMU's guest again", error))
    }

    fn destroy(&self) {
        self.is_destroying.store(true, Ordering::SeqCst);
        let _hand = self.hand.lock();
        // It stands, and its output is dropped. One that does not answer is the fence's.
        if let Err(error) = self.monitor.execute("quit", Value::Null, STOP_LIMIT)
            && !error.is_disconnect()
        {
            // Whoever sees the outcome says that the process may be there.
            return;
        }
        self.monitor.wait(LEAVE_LIMIT, |seen| seen.gone.is_some());
    }

    fn close_channels(&self) {
        // Later troubles are of what comes then.
        let trouble = || self.contact.get().and_then(|contact| contact.state().trouble);
        // A relay that ends closes the connections of the standby, which ends the contact.
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
            // It is asked for again.
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
        // Whoever waits for room for the next checkpoint has looked, or will.
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
                return Err("the protection is over".to_owned());
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

    fn received(&self, number: u64) -> bool {
        self.with_gates(Gates::end_epoch);
        let mut last = self.last.lock();
        let is_last = *last == Last::Granted(number);
        if is_last {
            *last = Last::Stands;
            self.changed.notify_all();
        }
        !is_last
    }

    fn check_disks(&self) -> Result<(), String> {
        self.disks.get().map_or(Ok(()), |disks| disks.check(&self.monitor).map_err(|error| error.to_string()))
    }

    fn ended(&self, why: String, is_standbys_fault: bool) {
        let event = if is_standbys_fault { Event::PeerMisbehaved } else { Event::ConnectionLost };
        let Some(contact) = self.contact.get() else { return };
        // Behind the last checkpoint of all it means nothing what the standby does with its connections.
        if *self.last.lock() == Last::Stands {
            return;
        }
        if contact.is_over_after_last_word() {
            return;
        }
        // The contact's own end follows, and would hide why.
        self.lost_because.get_or_init(|| why.clone());
        contact.failed(why, event);
    }
}
