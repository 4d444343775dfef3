//! The standby's side of the contact.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sterna::error::VmError;
use sterna::internals::Clock;
use sterna::internals::threads::{self, ThreadRole};
use sterna_proto::replica::standby::{self, Action, Event, Outcome, Standby, State};
use sterna_transport::Channel;
use sterna_wire::replica::Message;

use super::arbiter;
use super::error::ContactError;
use super::greeting::{Greeting, Protection, Secret, Terms, welcome};
use super::runner::{Claims, ContactState, Runner};

/// Performs the contact's actions on the held checkpoint. `prepare`, `fence` and `start` run in threads of their own,
/// one after the other.
pub trait StandbyGuest: Send + Sync {
    /// Closes the channels that carry checkpoints.
    fn close_channels(&self);
    /// Prepares this checkpoint for the start. No later checkpoint becomes held.
    ///
    /// # Errors
    /// Why it cannot be started. No claim was made.
    fn prepare(&self, checkpoint: u64) -> Result<(), VmError>;
    /// Makes sure that the primary's guest does not run.
    ///
    /// # Errors
    /// The guest may still run.
    fn fence(&self) -> Result<(), VmError>;
    /// Acquires the guest's resources and starts the guest.
    ///
    /// # Errors
    /// The guest does not run. The call may be repeated.
    fn start(&self) -> Result<(), VmError>;
    /// Drops the held checkpoint.
    fn discard(&self);
}

/// A guest's protection at its standby. Cloning gives another handle.
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
    /// Answers the primary that greets over `channel`, if it knows the secret and asks the same arbiter. `claims` is
    /// called with the protection, because its generation is part of the claim.
    ///
    /// # Errors
    /// [`ContactError`]; the contact has not begun.
    pub fn begin(
        channel: &Arc<Channel>,
        secret: &Secret,
        guest: Arc<dyn StandbyGuest>,
        claims: impl FnOnce(Protection) -> Arc<dyn Claims>,
    ) -> Result<Self, ContactError> {
        Self::begin_fencing(channel, secret, guest, false, claims)
    }

    /// Like [`begin`](Self::begin). With `always_fences`, the fence must succeed even if the primary stops its guest
    /// by itself.
    pub(crate) fn begin_fencing(
        channel: &Arc<Channel>,
        secret: &Secret,
        guest: Arc<dyn StandbyGuest>,
        always_fences: bool,
        claims: impl FnOnce(Protection) -> Arc<dyn Claims>,
    ) -> Result<Self, ContactError> {
        let (link, protection, terms, mut greeting) = welcome(channel, secret)?;
        greeting.needs_fence |= always_fences;
        let claims = claims(protection);
        arbiter::compare_second(&link, &*claims)?;
        let machine = Standby::new(standby::Config { protection, terms, needs_fence: greeting.needs_fence });
        let runner = Runner::new(machine, link, claims, Clock::with_suspends());
        let contact = Self { runner, protection, terms, greeting, ended: Arc::default() };
        contact.spawn(ThreadRole::Standby, {
            let contact = contact.clone();
            move || contact.control(&guest)
        })?;
        contact.spawn(ThreadRole::Heartbeats, {
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
            runner.tell(Event::ConnectionLost);
        };
        self.runner.spawn(role.into(), act, died).map(drop).map_err(|error| {
            self.runner.link.close();
            ContactError::Thread(error.to_string())
        })
    }

    /// Id and generation of the protection.
    pub fn protection(&self) -> Protection {
        self.protection
    }

    /// The protection's times, which the primary has set.
    pub fn terms(&self) -> Terms {
        self.terms
    }

    /// Whether the guest is started here only after a fence has succeeded.
    pub fn needs_fence(&self) -> bool {
        self.greeting.needs_fence
    }

    /// Whether the primary may send pages as differences over multifd channels.
    pub(crate) fn sends_differences(&self) -> bool {
        self.greeting.sends_differences
    }

    /// Whether the primary is in contact, as far as this side knows.
    pub fn is_in_contact(&self) -> bool {
        self.runner.driver.inspect(Standby::is_in_contact)
    }

    /// Whether the primary has stopped the guest so that this side takes over.
    pub fn is_given(&self) -> bool {
        self.runner.driver.inspect(Standby::is_given)
    }

    /// Whether checkpoint `number`, which is complete and checked, becomes held. False if a takeover is in progress.
    pub(crate) fn holds(&self, number: u64) -> bool {
        let fed = self.runner.driver.feed(Event::CheckpointHeld(number));
        fed.is_ok_and(|state| state == State::Following)
    }

    /// Stops this side without a message, as if its host had failed.
    pub(crate) fn abandon(&self) {
        self.runner.abandon();
    }

    /// Reports that a checkpoint is complete and checked (the first is 1).
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn checkpoint_held(&self, number: u64) -> Result<(), standby::Refusal> {
        self.runner.driver.feed(Event::CheckpointHeld(number)).map(drop)
    }

    /// Reports that the connection of the checkpoints failed: [`Event::ConnectionLost`], [`Event::PeerMisbehaved`] or
    /// [`Event::LocalFailure`].
    pub fn failed(&self, why: impl ToString, event: Event) {
        self.runner.note_end(why);
        self.runner.tell(event);
    }

    /// Requests a takeover, on behalf of the operator. For a planned takeover, checks first that the arbiter can be
    /// asked, which may take as long as a claim.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn take_over(&self, is_planned: bool) -> Result<(), standby::Refusal> {
        let is_arbiter_in_reach = !is_planned || self.runner.is_arbiter_in_reach();
        self.runner.driver.feed(Event::TakeOver { is_planned, is_arbiter_in_reach }).map(drop)
    }

    /// Repeats the failed step, on behalf of the operator.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn retry(&self) -> Result<(), standby::Refusal> {
        self.runner.driver.feed(Event::Retry).map(drop)
    }

    /// Records the operator's guarantee that the primary's guest does not run and never will.
    ///
    /// # Errors
    /// The machine's refusal.
    pub fn vouch(&self) -> Result<(), standby::Refusal> {
        self.runner.driver.feed(Event::Vouch).map(drop)
    }

    /// Number of the last held checkpoint; 0 before the first.
    pub fn held(&self) -> u64 {
        self.runner.driver.inspect(Standby::held)
    }

    /// The current state, outcome and trouble.
    pub fn state(&self) -> ContactState<State, Outcome> {
        ContactState {
            state: self.runner.driver.inspect(Standby::state),
            outcome: *self.ended.outcome.lock(),
            trouble: self.runner.trouble.lock().clone(),
        }
    }

    /// Waits, at most `most`, until the protection ends.
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

    /// Performs an action. Returns true if it was the last one.
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
                    // The arbiter matters only if the primary has given the guest, because only then can the guest go
                    // back.
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
        self.runner.send(message, Event::ConnectionLost);
    }
}

fn said(message: Message, protection: Protection) -> Event {
    match message {
        Message::Heartbeat(number) => Event::Heartbeat(protection, number),
        Message::Unprotect => Event::UnprotectRead(protection),
        Message::Give => Event::GiveRead(protection),
        Message::Gone => Event::GoneRead(protection),
        // The session rejects messages that only this side sends.
        _ => Event::PeerMisbehaved,
    }
}
