//! The primary's side of the contact.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna::error::VmError;
use sterna::internals::Clock;
use sterna::internals::threads::{self, ThreadRole};
use sterna_proto::replica::Answer;
use sterna_proto::replica::primary::{self, Action, Cause, Event, Outcome, Primary, State};
use sterna_transport::Channel;
use sterna_wire::replica::Message;

use super::arbiter;
use super::error::ContactError;
use super::greeting::{Greeting, Protection, Secret, Terms, greet};
use super::runner::{Claims, ContactState, Runner};
use super::watchdog::{Watchdog, keep};

/// How long this side waits for the standby's last message after the other connections were closed. The end of the
/// contact's own connection, or a silent standby, ends this wait earlier. The limit is long, because a busy host may
/// delay the message by seconds, and an end that an operator requested would then be reported as a loss.
const LAST_WORD_LIMIT: Duration = Duration::from_secs(20);
/// How long this side waits until the standby was informed of the guest's end.
const INFORMED_LIMIT: Duration = Duration::from_secs(2);
/// Interval between two checks for that message.
const LOOK: Duration = Duration::from_millis(2);

/// Performs the contact's actions on a guest that runs here, and on its gate. Called by one thread.
pub trait PrimaryGuest: Send + Sync {
    /// Stops the guest immediately.
    ///
    /// # Errors
    /// The guest may still run. The caller repeats the call, first after 10 ms and finally every second. While the
    /// guest cannot be stopped, this process should end, and the guest with it.
    fn stop(&self) -> Result<(), VmError>;
    /// Resumes the guest.
    ///
    /// # Errors
    /// The guest stays paused. The caller repeats the call, first after 10 ms and finally every second.
    fn resume(&self) -> Result<(), VmError>;
    /// The standby has the guest: it never runs here again.
    fn destroy(&self);
    /// Closes the channels that carry checkpoints.
    fn close_channels(&self);
    /// Stops the guest, takes a checkpoint and sends it. Calls `taken` with its number after it was taken, and before
    /// its end is sent.
    ///
    /// # Errors
    /// Why there is no checkpoint.
    fn take_last_checkpoint(&self, taken: &dyn Fn(u64)) -> Result<(), VmError>;
    /// Releases the guest's output up to the end of this epoch. Every piece calls [`PrimaryContact::may_say`] before
    /// it leaves the gate.
    fn release(&self, epoch: u64);
    /// Releases all output, now and later.
    fn open_gate(&self);
    /// Drops the output that has not left the gate.
    fn drop_output(&self);
}

/// A guest's protection at its primary. Cloning gives another handle.
#[derive(Clone)]
pub struct PrimaryContact {
    runner: Arc<Runner<Primary>>,
    ended: Arc<Ended>,
    terms: Terms,
    /// Whether the order to stop the guest was performed, and no order to resume it has followed.
    is_guest_stopped: Arc<AtomicBool>,
    /// When the last checkpoint became held, as far as this side knows.
    held_at: Arc<Mutex<Option<Instant>>>,
}

#[derive(Default)]
struct Ended {
    outcome: Mutex<Option<Outcome>>,
    changed: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl PrimaryContact {
    /// Greets the standby at the other end of `channel`. If both sides ask the same arbiter, starts heartbeats.
    ///
    /// `needs_fence`: the guest may continue to run although [`PrimaryGuest::stop`] was called. This is so if another
    /// process runs the guest.
    ///
    /// # Errors
    /// [`ContactError`]; the contact has not begun.
    pub fn begin(
        channel: &Arc<Channel>,
        protection: Protection,
        terms: Terms,
        needs_fence: bool,
        secret: &Secret,
        guest: Arc<dyn PrimaryGuest>,
        claims: Arc<dyn Claims>,
    ) -> Result<Self, ContactError> {
        // Two, because a program that relays a stream reports a checkpoint as taken before it knows that one is in
        // flight.
        let config = primary::Config { protection, terms, in_flight: 2 };
        let greeting = Greeting { needs_fence, sends_differences: false };
        Self::begin_as(channel, config, greeting, secret, guest, claims)
    }

    /// Like [`begin`](Self::begin), with a complete greeting, and the number of checkpoints that may be in flight.
    pub(crate) fn begin_as(
        channel: &Arc<Channel>,
        config: primary::Config,
        greeting: Greeting,
        secret: &Secret,
        guest: Arc<dyn PrimaryGuest>,
        claims: Arc<dyn Claims>,
    ) -> Result<Self, ContactError> {
        let clock = Clock::with_suspends();
        Self::begin_with(channel, config, greeting, secret, guest, claims, clock)
    }

    /// Like [`begin_as`](Self::begin_as), with the clock that measures the lease.
    pub(super) fn begin_with(
        channel: &Arc<Channel>,
        config: primary::Config,
        greeting: Greeting,
        secret: &Secret,
        guest: Arc<dyn PrimaryGuest>,
        claims: Arc<dyn Claims>,
        clock: Clock,
    ) -> Result<Self, ContactError> {
        let primary::Config { protection, terms, .. } = config;
        let arbiter = arbiter::found(&*claims)?;
        let link = greet(channel, protection, terms, greeting, secret)?;
        arbiter::compare_first(&link, &arbiter, &*claims)?;
        let runner = Runner::new(Primary::new(config, Duration::ZERO), link, claims, clock);
        let contact = Self {
            runner,
            ended: Arc::default(),
            terms,
            is_guest_stopped: Arc::default(),
            held_at: Arc::default(),
        };
        contact.spawn(ThreadRole::Protection, {
            let contact = contact.clone();
            move || contact.control(&guest)
        })?;
        contact.spawn(ThreadRole::ProtectionAnswers, {
            let runner = Arc::clone(&contact.runner);
            move || {
                let said = |message| said(message, protection);
                runner.read(said, Event::ConnectionLost, Event::PeerMisbehaved);
            }
        })?;
        Ok(contact)
    }

    fn spawn(&self, role: ThreadRole, act: impl FnOnce() + Send + 'static) -> Result<(), ContactError> {
        let runner = Arc::clone(&self.runner);
        let died = move |error| {
            runner.note(error);
            runner.tell(Event::LocalFailure);
        };
        let thread = self.runner.spawn(role.into(), act, died).map_err(|error| {
            self.runner.link.close();
            ContactError::Thread(error.to_string())
        })?;
        self.ended.threads.lock().push(thread);
        Ok(())
    }

    /// Arms `watchdog`: it resets this host if the guest still runs after the end of the lease.
    ///
    /// From now on the watchdog is fed only while the lease outlasts its timeout, or the guest is known to be
    /// stopped. It is disarmed at the end of the protection.
    ///
    /// # Errors
    /// The watchdog has no timeout that fits the lease, or the host cannot create a thread. The watchdog is then
    /// disarmed.
    pub fn arm(&self, watchdog: Arc<dyn Watchdog>) -> Result<(), ContactError> {
        let longest = self.terms.lease / 2 + self.terms.margin;
        let refused = |why: String| ContactError::Watchdog(why);
        let timeout = watchdog.arm(longest).map_err(refused)?;
        let contact = self.clone();
        let fed = Arc::clone(&watchdog);
        let begun =
            self.spawn(ThreadRole::Watchdog, move || keep(&*fed, timeout, &|| contact.watched(timeout)));
        begun.inspect_err(|_| drop(watchdog.disarm()))
    }

    /// Whether a watchdog with that timeout may be fed now; `None` after the end of the protection.
    fn watched(&self, timeout: Duration) -> Option<bool> {
        if self.ended.outcome.lock().is_some() {
            return None;
        }
        let driver = &self.runner.driver;
        let lasts = driver.inspect(|machine| machine.lease_lasts(driver.now()));
        // If the watchdog is fed before the lease ends, it must expire within the margin after the lease.
        let outlasts =
            |lasts: Duration| !lasts.is_zero() && lasts.saturating_add(self.terms.margin) >= timeout;
        let is_covered = lasts.is_none_or(outlasts);
        Some(is_covered || self.is_guest_stopped.load(Ordering::Acquire))
    }

    /// Reports that a checkpoint was taken (the first is 1). Call it before the end of the checkpoint is handed to
    /// the transport.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn checkpoint_taken(&self, number: u64) -> Result<(), primary::Refusal> {
        self.runner.driver.feed(Event::CheckpointTaken(number)).map(drop)
    }

    /// Reports that the connection of the checkpoints failed, or that a checkpoint could not be taken.
    pub fn failed(&self, why: impl ToString, event: Event) {
        self.runner.note_end(why);
        self.runner.tell(event);
    }

    /// Whether the protection is over when a connection other than the contact's ends.
    ///
    /// A standby that sends its last message closes all connections, and that message arrives on the contact's own.
    /// If the standby was asked for it, this waits for the message, at most 20 seconds.
    pub fn is_over_after_last_word(&self) -> bool {
        let until = Instant::now() + LAST_WORD_LIMIT;
        let state = || self.runner.driver.inspect(Primary::state);
        while state() == State::Ending && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
        state().is_final()
    }

    /// Reports that the guest has ended with its process, without an operator's request. The standby then takes over
    /// without waiting.
    ///
    /// Returns when the standby has been informed, or after two seconds. Close the connections of the checkpoints
    /// only after this call.
    pub fn guest_gone(&self, why: impl ToString) {
        self.runner.note_end(why);
        self.runner.tell(Event::GuestGone);
        let until = Instant::now() + INFORMED_LIMIT;
        while self.ended.outcome.lock().is_none() && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
    }

    /// Ends the protection; the guest stays here.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn unprotect(&self) -> Result<(), primary::Refusal> {
        self.runner.driver.feed(Event::Unprotect).map(drop)
    }

    /// Starts a planned takeover by the standby, if the arbiter can be asked. This check may take as long as a claim.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn hand_over(&self) -> Result<(), primary::Refusal> {
        let is_arbiter_in_reach = self.runner.is_arbiter_in_reach();
        self.runner.driver.feed(Event::HandOver { is_arbiter_in_reach }).map(drop)
    }

    /// Whether the guest's output of this epoch may leave the gate now.
    pub fn may_say(&self, epoch: u64) -> bool {
        let driver = &self.runner.driver;
        driver.inspect(|machine| machine.may_say(driver.now(), epoch))
    }

    /// Whether another checkpoint may be taken now. `is_last`: the checkpoint of a planned takeover.
    pub(crate) fn may_take_checkpoint(&self, is_last: bool) -> bool {
        self.runner.driver.inspect(|machine| match is_last {
            true => machine.state() == State::HandingOver,
            false => machine.may_take_checkpoint(),
        })
    }

    /// Whether the guest may run now. Check this immediately before the guest is resumed: after a checkpoint, and at
    /// an operator's request.
    pub fn may_guest_run(&self) -> bool {
        let driver = &self.runner.driver;
        driver.inspect(|machine| machine.may_guest_run(driver.now()))
    }

    /// Whether the protection has ended before its first checkpoint was held.
    pub(crate) fn has_failed(&self) -> bool {
        self.runner.driver.inspect(Primary::state) == State::Failed
    }

    /// Number of the last checkpoint that the standby holds; 0 before the first.
    pub fn held(&self) -> u64 {
        self.runner.driver.inspect(Primary::held)
    }

    /// Age of the last held checkpoint, as far as this side knows; `None` before the first.
    pub fn held_for(&self) -> Option<Duration> {
        self.held_at.lock().map(|at| at.elapsed())
    }

    /// The current state, outcome and trouble.
    pub fn state(&self) -> ContactState<State, Outcome> {
        // The end of a lease has no error text of its own, so the text is made here from the machine's cause.
        let (state, cause) = self.runner.driver.inspect(|machine| (machine.state(), machine.cause()));
        let late = || {
            let lease = self.terms.lease.as_secs_f64();
            let why = format!("the standby has not answered for as long as the lease ({lease} s)");
            (cause == Some(Cause::LeaseOver)).then_some(why)
        };
        ContactState {
            state,
            outcome: *self.ended.outcome.lock(),
            trouble: self.runner.trouble.lock().clone().or_else(late),
        }
    }

    /// Waits until the protection ends.
    pub fn wait(&self) -> Outcome {
        let mut outcome = self.ended.outcome.lock();
        loop {
            if let Some(outcome) = *outcome {
                return outcome;
            }
            self.ended.changed.wait(&mut outcome);
        }
    }

    fn control(&self, guest: &Arc<dyn PrimaryGuest>) {
        self.runner.control(|action| {
            // A panic of a callback counts as a failure; the actions that follow are still performed.
            threads::caught("PrimaryGuest", || self.perform(guest, action)).unwrap_or_else(|error| {
                self.runner.note(error);
                self.runner.tell(Event::LocalFailure);
                false
            })
        });
    }

    /// Performs an action. Returns true if it was the last one.
    fn perform(&self, guest: &Arc<dyn PrimaryGuest>, action: Action) -> bool {
        let runner = &self.runner;
        match action {
            Action::SendHeartbeat(number) => self.send(Message::Heartbeat(number)),
            Action::SendGive => {
                // The guest was stopped for its last checkpoint, and the output that this checkpoint releases has
                // left the gate.
                self.is_guest_stopped.store(true, Ordering::Release);
                self.send(Message::Give);
            }
            Action::SendGone => self.send(Message::Gone),
            Action::SendUnprotect => self.send(Message::Unprotect),
            Action::Release(epoch) => {
                *self.held_at.lock() = Some(Instant::now());
                guest.release(epoch);
            }
            Action::TakeLastCheckpoint => {
                let (guest, driver) = (Arc::clone(guest), Arc::clone(runner));
                let take = move || {
                    let taken = |number| driver.tell(Event::LastCheckpointTaken(number));
                    guest.take_last_checkpoint(&taken).map_err(|error| error.to_string())?;
                    Ok(Event::Tick)
                };
                runner.beside("the last checkpoint", take, Event::LocalFailure);
            }
            Action::StopGuest => {
                self.insist("stopping the guest", || guest.stop());
                self.is_guest_stopped.store(true, Ordering::Release);
            }
            Action::ResumeGuest => {
                self.is_guest_stopped.store(false, Ordering::Release);
                self.insist("resuming the guest", || guest.resume());
            }
            Action::CloseChannels => {
                runner.link.close();
                guest.close_channels();
            }
            Action::Claim => {
                let claims = Arc::clone(&runner.claims);
                let ask = move || claims.claim().map(Event::Ruled);
                runner.beside("the claim", ask, Event::ArbiterOutOfReach);
            }
            Action::OpenGate => guest.open_gate(),
            Action::DropOutput => guest.drop_output(),
            Action::DestroyGuest => guest.destroy(),
            Action::Finish(outcome) => {
                *self.ended.outcome.lock() = Some(outcome);
                self.ended.changed.notify_all();
                return true;
            }
        }
        false
    }

    fn send(&self, message: Message) {
        self.runner.send(message, Event::ConnectionLost);
    }

    /// Repeats `act` until it succeeds. The gate keeps all output meanwhile.
    fn insist(&self, what: &str, act: impl Fn() -> Result<(), VmError>) {
        // Short at first, so that a guest that fails to stop once still stops within the margin.
        let mut pause = Duration::from_millis(10);
        while let Err(error) = threads::tried(what, &act) {
            self.runner.note(format!("{what}: {error}"));
            std::thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_secs(1));
        }
    }
}

fn said(message: Message, protection: Protection) -> Event {
    match message {
        Message::Answer { held, heartbeat } => Event::Answered(Answer { protection, held, heartbeat }),
        Message::Never => Event::Never(protection),
        Message::Runs => Event::StandbyRuns(protection),
        Message::HandOver => Event::HandOverRequested(protection),
        // The session rejects messages that only this side sends.
        Message::Heartbeat(_) | Message::Unprotect | Message::Give | Message::Gone => Event::PeerMisbehaved,
    }
}
