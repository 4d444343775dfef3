//! The primary's side of the contact.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_proto::replica::Answer;
use sterna_proto::replica::primary::{self, Action, Event, Outcome, Primary, State};
use sterna_transport::Channel;
use sterna_wire::replica::Message;

use super::arbiter;
use super::error::ContactError;
use super::greeting::{Greeting, Protection, Secret, Terms, greet};
use super::runner::{Claims, ContactState, Runner};
use crate::driver::Machine;
use crate::error::VmError;
use crate::threads;

/// How long the standby's last word may take after the end of the other connections.
const LAST_WORD_LIMIT: Duration = Duration::from_secs(2);
/// Between two looks whether it has come.
const LOOK: Duration = Duration::from_millis(2);

/// What the contact does to a guest that runs here, and to its gate. Called by one thread.
pub trait PrimaryGuest: Send + Sync {
    /// Stops the guest at once.
    ///
    /// # Errors
    /// It may still run: then this process should end, and the guest with it. It is asked for again, first soon and then every second.
    fn stop(&self) -> Result<(), VmError>;
    /// Lets the guest run again.
    ///
    /// # Errors
    /// It stands. It is asked for again, first soon and then every second.
    fn resume(&self) -> Result<(), VmError>;
    /// The standby has the guest: it never runs here again.
    fn destroy(&self);
    /// Closes the channels by which checkpoints travel.
    fn close_channels(&self);
    /// Stops the guest, takes a checkpoint and sends it. Calls `taken` with its number when it was taken, before its end is sent.
    ///
    /// # Errors
    /// Why there is none.
    fn take_last_checkpoint(&self, taken: &dyn Fn(u64)) -> Result<(), VmError>;
    /// What the guest said up to the end of this epoch may go. Every piece asks [`PrimaryContact::may_say`] when it leaves.
    fn release(&self, epoch: u64);
    /// Everything may go, now and later.
    fn open_gate(&self);
    /// What was said and has not gone never goes.
    fn drop_output(&self);
}

/// A guest's protection, as its primary sees it. Cloning gives another handle.
#[derive(Clone)]
pub struct PrimaryContact {
    runner: Arc<Runner<Primary>>,
    ended: Arc<Ended>,
}

#[derive(Default)]
struct Ended {
    outcome: Mutex<Option<Outcome>>,
    changed: Condvar,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl PrimaryContact {
    /// Greets the standby at the other end of `channel`, and begins with heartbeats, if both sides ask one arbiter.
    ///
    /// `needs_fence`: the guest may run on although [`PrimaryGuest::stop`] was called, as one of another process does.
    ///
    /// # Errors
    /// [`ContactError`]; nothing was begun.
    pub fn begin(
        channel: &Arc<Channel>,
        protection: Protection,
        terms: Terms,
        needs_fence: bool,
        secret: &Secret,
        guest: Arc<dyn PrimaryGuest>,
        claims: Arc<dyn Claims>,
    ) -> Result<Self, ContactError> {
        // Whoever relays a stream says that a checkpoint was taken before it knows that one is under way.
        let config = primary::Config { protection, terms, in_flight: 2 };
        let greeting = Greeting { needs_fence, sends_differences: false };
        Self::begin_as(channel, config, greeting, secret, guest, claims)
    }

    /// As [`begin`](Self::begin), with all that a greeting says, and so many checkpoints that may be taken and not be held.
    pub(in crate::replica) fn begin_as(
        channel: &Arc<Channel>,
        config: primary::Config,
        greeting: Greeting,
        secret: &Secret,
        guest: Arc<dyn PrimaryGuest>,
        claims: Arc<dyn Claims>,
    ) -> Result<Self, ContactError> {
        let primary::Config { protection, terms, .. } = config;
        let arbiter = arbiter::found(&*claims)?;
        let link = greet(channel, protection, terms, greeting, secret)?;
        arbiter::compare_first(&link, &arbiter, &*claims)?;
        let runner = Runner::new(Primary::new(config, Duration::ZERO), link, claims);
        let contact = Self { runner, ended: Arc::default() };
        contact.spawn("protection", {
            let contact = contact.clone();
            move || contact.control(&guest)
        })?;
        contact.spawn("protection's answers", {
            let runner = Arc::clone(&contact.runner);
            move || {
                let said = |message| said(message, protection);
                runner.read(said, Event::ConnectionLost, Event::PeerMisbehaved);
            }
        })?;
        Ok(contact)
    }

    fn spawn(&self, name: &str, act: impl FnOnce() + Send + 'static) -> Result<(), ContactError> {
        let runner = Arc::clone(&self.runner);
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn({
            let name = name.to_owned();
            move || {
                if let Err(error) = threads::caught(&name, act) {
                    runner.note(error);
                    runner.tell(Event::LocalFailure);
                }
            }
        });
        let thread = thread.map_err(|error| {
            self.runner.link.close();
            ContactError::Thread(error.to_string())
        })?;
        self.ended.threads.lock().push(thread);
        Ok(())
    }

    /// A checkpoint was taken (the first is 1). Say it before its end is handed to the transport.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn checkpoint_taken(&self, number: u64) -> Result<(), primary::Refusal> {
        self.runner.driver.feed(Event::CheckpointTaken(number)).map(drop)
    }

    /// What carries the checkpoints failed, or the taking of one did.
    pub fn failed(&self, why: impl ToString, event: Event) {
        self.runner.note_end(why);
        self.runner.tell(event);
    }

    /// Whether all is over when another connection than the contact's ends. A standby that says its last word closes all of them, and the
    /// word comes by the contact's own: this waits for it, for two seconds at most, where the standby was asked for it.
    pub fn is_over_after_last_word(&self) -> bool {
        let until = Instant::now() + LAST_WORD_LIMIT;
        let state = || self.runner.driver.inspect(Primary::state);
        while state() == State::Ending && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
        state().is_final()
    }

    /// Ends the protection with the guest here.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn unprotect(&self) -> Result<(), primary::Refusal> {
        self.runner.driver.feed(Event::Unprotect).map(drop)
    }

    /// Hands the guest over as planned, if the arbiter can be asked. May take as long as a claim.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn hand_over(&self) -> Result<(), primary::Refusal> {
        let is_arbiter_in_reach = self.runner.is_arbiter_in_reach();
        self.runner.driver.feed(Event::HandOver { is_arbiter_in_reach }).map(drop)
    }

    /// Whether what the guest said in this epoch may leave, now.
    pub fn may_say(&self, epoch: u64) -> bool {
        let driver = &self.runner.driver;
        driver.inspect(|machine| machine.may_say(driver.now(), epoch))
    }

    /// Whether another checkpoint may be taken now; `is_last`: the one of a planned takeover.
    pub(crate) fn may_take_checkpoint(&self, is_last: bool) -> bool {
        self.runner.driver.inspect(|machine| match is_last {
            true => machine.state() == State::HandingOver,
            false => machine.may_take_checkpoint(),
        })
    }

    /// Whether the guest may run.
    pub fn may_guest_run(&self) -> bool {
        self.runner.driver.inspect(Primary::may_guest_run)
    }

    /// Whether the protection has ended before its first checkpoint was held.
    pub(crate) fn has_failed(&self) -> bool {
        self.runner.driver.inspect(Primary::state) == State::Failed
    }

    /// The last checkpoint that the standby holds; 0 before the first.
    pub fn held(&self) -> u64 {
        self.runner.driver.inspect(Primary::held)
    }

    /// Where it stands.
    pub fn state(&self) -> ContactState<State, Outcome> {
        ContactState {
            state: self.runner.driver.inspect(Primary::state),
            outcome: *self.ended.outcome.lock(),
            trouble: self.runner.trouble.lock().clone(),
        }
    }

    /// Waits for the end of the protection.
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
            // A callback that panics has failed; what remains to be done is still done.
            threads::caught("PrimaryGuest", || self.perform(guest, action)).unwrap_or_else(|error| {
                self.runner.note(error);
                self.runner.tell(Event::LocalFailure);
                false
            })
        });
    }

    /// True: it was the last action.
    fn perform(&self, guest: &Arc<dyn PrimaryGuest>, action: Action) -> bool {
        let runner = &self.runner;
        match action {
            Action::SendHeartbeat(number) => self.send(Message::Heartbeat(number)),
            Action::SendGive => self.send(Message::Give),
            Action::SendUnprotect => self.send(Message::Unprotect),
            Action::Release(epoch) => guest.release(epoch),
            Action::TakeLastCheckpoint => {
                let (guest, driver) = (Arc::clone(guest), Arc::clone(runner));
                let take = move || {
                    let taken = |number| driver.tell(Event::LastCheckpointTaken(number));
                    guest.take_last_checkpoint(&taken).map_err(|error| error.to_string())?;
                    Ok(Event::Tick)
                };
                runner.beside("the last checkpoint", take, Event::LocalFailure);
            }
            Action::StopGuest => self.insist("stopping the guest", || guest.stop()),
            Action::ResumeGuest => self.insist("resuming the guest", || guest.resume()),
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
        if let Err(why) = self.runner.link.send(message) {
            self.runner.note_end(why);
            self.runner.tell(Event::ConnectionLost);
        }
    }

    /// Until it is done. The gate holds everything back meanwhile.
    fn insist(&self, what: &str, act: impl Fn() -> Result<(), VmError>) {
        // At first soon: a guest that failed to stop once still stops within the margin.
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
        // The session lets nothing of this side through.
        Message::Heartbeat(_) | Message::Unprotect | Message::Give => Event::PeerMisbehaved,
    }
}

impl Machine for Primary {
    type Event = Event;
    type Action = Action;
    type Refusal = primary::Refusal;
    type State = State;
    const TICK: Event = Event::Tick;
    fn handle(&mut self, now: Duration, event: Event) -> Result<Vec<Action>, primary::Refusal> {
        Self::handle(self, now, event)
    }
    fn state(&self) -> State {
        Self::state(self)
    }
    fn deadline(&self) -> Option<Duration> {
        Self::deadline(self)
    }
    fn is_over(&self) -> bool {
        Self::state(self).is_final()
    }
}
