//! The standby's side of the contact.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sterna_proto::replica::standby::{self, Action, Event, Outcome, Standby, State};
use sterna_transport::Channel;
use sterna_wire::replica::Message;

use super::arbiter;
use super::error::ContactError;
use super::greeting::{Greeting, Protection, Secret, Terms, welcome};
use super::runner::{Claims, ContactState, Runner};
use crate::driver::Machine;
use crate::error::VmError;
use crate::threads;

/// What the contact does with the checkpoints that are held here. `prepare`, `fence` and `start` have threads of their own, one
/// after the other.
pub trait StandbyGuest: Send + Sync {
    /// Closes the channels by which checkpoints come.
    fn close_channels(&self);
    /// Makes this checkpoint ready to start. No later one becomes held.
    ///
    /// # Errors
    /// Why it cannot be started; nothing was claimed.
    fn prepare(&self, checkpoint: u64) -> Result<(), VmError>;
    /// Sees to it that the primary's guest does not run.
    ///
    /// # Errors
    /// It may run.
    fn fence(&self) -> Result<(), VmError>;
    /// Acquires what belongs to the guest, and starts it.
    ///
    /// # Errors
    /// It does not run; it may be tried again.
    fn start(&self) -> Result<(), VmError>;
    /// Forgets everything that is held.
    fn discard(&self);
}

/// A guest's protection, as its standby sees it. Cloning gives another handle.
#[derive(Clone)]
pub struct StandbyContact {
    runner: Arc<Runner<Standby>>,
    protection: Protection,
    terms: Terms,
    greeting: Greeting,
    ended: Arc<Ended>,
}

#[derive(Default)]
struct Ended {
    outcome: Mutex<Option<Outcome>>,
    changed: Condvar,
}

impl StandbyContact {
    /// Answers the primary that greets over `channel`, if it knows the secret and asks the same arbiter. `claims` is asked for with the protection, of which
    /// the generation is part.
    ///
    /// # Errors
    /// [`ContactError`]; nothing was begun.
    pub fn begin(
        channel: &Arc<Channel>,
        secret: &Secret,
        guest: Arc<dyn StandbyGuest>,
        claims: impl FnOnce(Protection) -> Arc<dyn Claims>,
    ) -> Result<Self, ContactError> {
        let (link, protection, terms, greeting) = welcome(channel, secret)?;
        let claims = claims(protection);
        arbiter::compare_second(&link, &*claims)?;
        let machine = Standby::new(standby::Config { protection, terms, needs_fence: greeting.needs_fence });
        let runner = Runner::new(machine, link, claims);
        let contact = Self { runner, protection, terms, greeting, ended: Arc::default() };
        contact.spawn("standby", {
            let contact = contact.clone();
            move || contact.control(&guest)
        })?;
        contact.spawn("primary's heartbeats", {
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
        let begun = std::thread::Builder::new().name(name.to_owned()).spawn({
            let name = name.to_owned();
            move || {
                if let Err(error) = threads::caught(&name, act) {
                    runner.note(error);
                    runner.tell(Event::ConnectionLost);
                }
            }
        });
        begun.map(drop).map_err(|error| {
            self.runner.link.close();
            ContactError::Thread(error.to_string())
        })
    }

    /// Which protection it is.
    pub fn protection(&self) -> Protection {
        self.protection
    }

    /// The times that the primary has set.
    pub fn terms(&self) -> Terms {
        self.terms
    }

    /// Whether the guest is started here only after a fence has worked.
    pub fn needs_fence(&self) -> bool {
        self.greeting.needs_fence
    }

    /// Whether pages may come as differences over multifd channels.
    pub(in crate::replica) fn sends_differences(&self) -> bool {
        self.greeting.sends_differences
    }

    /// Whether the primary is in contact, as far as this side knows.
    pub fn is_in_contact(&self) -> bool {
        self.runner.driver.inspect(Standby::is_in_contact)
    }

    /// Whether the primary has stopped the guest for this side.
    pub fn is_given(&self) -> bool {
        self.runner.driver.inspect(Standby::is_given)
    }

    /// Whether checkpoint `number`, which has come whole and was checked, is held from now on. No, if a takeover is under way.
    pub(in crate::replica) fn holds(&self, number: u64) -> bool {
        let fed = self.runner.driver.feed(Event::CheckpointHeld(number));
        fed.is_ok_and(|state| state == State::Following)
    }

    /// As if this side had died.
    pub(in crate::replica) fn abandon(&self) {
        self.runner.abandon();
    }

    /// A checkpoint has come whole and was checked (the first is 1).
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn checkpoint_held(&self, number: u64) -> Result<(), standby::Refusal> {
        self.runner.driver.feed(Event::CheckpointHeld(number)).map(drop)
    }

    /// What brings the checkpoints failed: [`Event::ConnectionLost`], [`Event::PeerMisbehaved`] or [`Event::LocalFailure`].
    pub fn failed(&self, why: impl ToString, event: Event) {
        self.runner.note_end(why);
        self.runner.tell(event);
    }

    /// The operator wants a takeover. For a planned one the arbiter is asked first whether it is there, which may take as long as a claim.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn take_over(&self, is_planned: bool) -> Result<(), standby::Refusal> {
        let is_arbiter_in_reach = !is_planned || self.runner.is_arbiter_in_reach();
        self.runner.driver.feed(Event::TakeOver { is_planned, is_arbiter_in_reach }).map(drop)
    }

    /// The operator wants the failed step again.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn retry(&self) -> Result<(), standby::Refusal> {
        self.runner.driver.feed(Event::Retry).map(drop)
    }

    /// The operator vouches that the primary's guest does not run and never will.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn vouch(&self) -> Result<(), standby::Refusal> {
        self.runner.driver.feed(Event::Vouch).map(drop)
    }

    /// The last checkpoint that is held; 0 before the first.
    pub fn held(&self) -> u64 {
        self.runner.driver.inspect(Standby::held)
    }

    /// Where it stands.
    pub fn state(&self) -> ContactState<State, Outcome> {
        ContactState {
            state: self.runner.driver.inspect(Standby::state),
            outcome: *self.ended.outcome.lock(),
            trouble: self.runner.trouble.lock().clone(),
        }
    }

    /// Waits for the end of the protection, no longer than `most`.
    pub fn wait(&self, most: Duration) -> Option<Outcome> {
        let mut outcome = self.ended.outcome.lock();
        self.ended.changed.wait_while_for(&mut outcome, |outcome| outcome.is_none(), most);
        *outcome
    }

    fn control(&self, guest: &Arc<dyn StandbyGuest>) {
        self.runner.control(|action| {
            threads::caught("StandbyGuest", || self.perform(guest, action)).unwrap_or_else(|error| {
                self.runner.note(error);
                false
            })
        });
    }

    /// True: it was the last action.
    fn perform(&self, guest: &Arc<dyn StandbyGuest>, action: Action) -> bool {
        let runner = &self.runner;
        let text = |error: VmError| error.to_string();
        match action {
            Action::SendAnswer(answer) => {
                self.send(Message::Answer { held: answer.held, heartbeat: answer.heartbeat });
            }
            Action::SendNever => self.send(Message::Never),
            Action::SendRuns => self.send(Message::Runs),
            Action::SendHandOver => self.send(Message::HandOver),
            Action::CloseChannels => {
                runner.link.close();
                guest.close_channels();
            }
            Action::Prepare(checkpoint) => {
                let guest = Arc::clone(guest);
                let asked = Arc::clone(runner);
                let prepare = move || {
                    guest.prepare(checkpoint).map_err(text)?;
                    // Only a guest that was given can go back.
                    let is_given = asked.driver.inspect(Standby::is_given);
                    let is_arbiter_in_reach = !is_given || asked.is_arbiter_in_reach();
                    Ok(Event::Prepared { is_arbiter_in_reach })
                };
                runner.beside("making the checkpoint ready", prepare, Event::PrepareFailed);
            }
            Action::Claim => {
                let claims = Arc::clone(&runner.claims);
                let ask = move || claims.claim().map(Event::Ruled);
                runner.beside("the claim", ask, Event::ArbiterOutOfReach);
            }
            Action::Fence => {
                let guest = Arc::clone(guest);
                let fence = move || guest.fence().map(|()| Event::Fenced).map_err(text);
                runner.beside("the fence", fence, Event::FenceFailed);
            }
            Action::Start => {
                let guest = Arc::clone(guest);
                let start = move || guest.start().map(|()| Event::Started).map_err(text);
                runner.beside("starting the guest", start, Event::StartFailed);
            }
            Action::Discard => guest.discard(),
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
}

fn said(message: Message, protection: Protection) -> Event {
    match message {
        Message::Heartbeat(number) => Event::Heartbeat(protection, number),
        Message::Unprotect => Event::UnprotectRead(protection),
        Message::Give => Event::GiveRead(protection),
        // The session lets nothing of this side through.
        _ => Event::PeerMisbehaved,
    }
}

impl Machine for Standby {
    type Event = Event;
    type Action = Action;
    type Refusal = standby::Refusal;
    type State = State;
    const TICK: Event = Event::Tick;
    fn handle(&mut self, now: Duration, event: Event) -> Result<Vec<Action>, standby::Refusal> {
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
