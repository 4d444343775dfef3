//! Runs one side's machine: the code that both sides share for performing actions and for starting threads.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna::error::MigrationError;
use sterna::internals::Clock;
use sterna::internals::Driver;
use sterna::internals::threads::{self, NewThread, OnThreadStart, ThreadRole, hooked};
use sterna_proto::machine::Machine;
use sterna_proto::replica::Ruling;
use sterna_transport::TransportError;
use sterna_wire::replica::{ArbiterIdentity, Message};

use super::error::ContactError;
use super::link::Link;

/// Longest sleep of the control thread when no action is due.
const PATIENCE: Duration = Duration::from_secs(1);

/// Most actions that may be queued while the next message of the peer is read. A machine returns at most six actions
/// per event.
const MOST_WAITING: usize = 64;
/// Interval between two checks of the queue's length.
const LOOK: Duration = Duration::from_millis(1);

/// Number of logged texts that are remembered.
const LOGGED: usize = 16;

/// Access to the arbiter's claim of this protection's generation, for this side.
pub trait Claims: Send + Sync {
    /// Asks the arbiter for the claim. Must be safe to repeat, because an answer may have been lost.
    ///
    /// # Errors
    /// Why there is no ruling. The arbiter may have ruled nevertheless.
    fn claim(&self) -> Result<Ruling, String>;

    /// Identity of the arbiter. Each side is asked during the greeting; a protection begins only if both ask the same
    /// arbiter ([`ArbiterIdentity::is_same`]). The default identity is empty, and two sides with empty identities may
    /// begin.
    ///
    /// # Errors
    /// The arbiter cannot be asked now.
    fn arbiter(&self) -> Result<ArbiterIdentity, String> {
        Ok(ArbiterIdentity::default())
    }

    /// Checks that the arbiter can be asked now, as far as that is possible without a claim.
    ///
    /// # Errors
    /// Why it cannot be asked.
    fn look(&self) -> Result<(), String> {
        Ok(())
    }

    /// Called, at the primary only, after both sides have read the results of [`Claims::arbiter`].
    fn arbiters_compared(&self) {}
}

impl<F: Fn() -> Result<Ruling, String> + Send + Sync> Claims for F {
    fn claim(&self) -> Result<Ruling, String> {
        self()
    }
}

/// A protection's progress, as one side's handle returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContactState<S, O> {
    /// The machine's state.
    pub state: S,
    /// How the protection ended, if it has ended.
    pub outcome: Option<O>,
    /// Why contact was lost (the first cause), or why a step failed (the last one).
    pub trouble: Option<String>,
}

/// The machine of one side, and the data that its threads share.
pub(super) struct Runner<M: Machine> {
    pub(super) driver: Driver<M>,
    pub(super) link: Link,
    pub(super) claims: Arc<dyn Claims>,
    pub(super) trouble: parking_lot::Mutex<Option<String>>,
    /// Texts that were logged last, so that repeated attempts are logged once.
    logged: parking_lot::Mutex<VecDeque<String>>,
    /// Whether the cause for the end of the contact or of the reception is recorded. Later ends are consequences.
    has_ended: AtomicBool,
    /// Whether this side performs no further actions, as if its host had failed.
    is_abandoned: AtomicBool,
    /// The VMM's hook of the thread that began the contact. Later threads have it, too.
    hook: Option<OnThreadStart>,
}

impl<M> Runner<M>
where
    M: Machine + Send + 'static,
    M::Event: Send,
    M::Action: Copy + Debug + Send,
    M::State: Debug + Send,
{
    /// Creates a runner. The machine's time zero is now, by `clock`.
    pub(super) fn new(machine: M, link: Link, claims: Arc<dyn Claims>, clock: Clock) -> Arc<Self> {
        let driver = Driver::with_clock(machine, clock, |_: &M| {});
        let (trouble, logged, has_ended, is_abandoned) = Default::default();
        let hook = sterna_ram::threads::hook();
        Arc::new(Self { driver, link, claims, trouble, logged, has_ended, is_abandoned, hook })
    }

    /// From now on, this side sends nothing and performs no actions, as if its host had failed.
    pub(super) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Release);
        self.link.close();
    }

    /// Feeds an event that the machine must accept, because it has already happened.
    pub(super) fn tell(&self, event: M::Event) {
        if let Err(refusal) = self.driver.feed(event) {
            tracing::error!(%refusal, "a protection's machine refused what happened");
        }
    }

    /// Records a problem for the operator, and logs it.
    pub(super) fn note(&self, trouble: impl ToString) {
        *self.trouble.lock() = Some(self.log(trouble.to_string()));
    }

    fn log(&self, trouble: String) -> String {
        let mut logged = self.logged.lock();
        // Some attempts are repeated often: asking an arbiter that is out of reach, and stopping a guest that does
        // not stop.
        if !logged.contains(&trouble) {
            tracing::warn!(trouble, "a protection");
            if logged.len() == LOGGED {
                logged.pop_front();
            }
            logged.push_back(trouble.clone());
        }
        trouble
    }

    /// Records that a connection has ended; the first reason counts. After the protection's end this is no problem,
    /// because the other side closes connections that are no longer needed.
    pub(super) fn note_end(&self, why: impl ToString) {
        match self.driver.inspect(M::is_over) {
            true => tracing::debug!(why = why.to_string(), "behind the end of a protection"),
            false if self.has_ended.swap(true, Ordering::AcqRel) => drop(self.log(why.to_string())),
            false => self.note(why),
        }
    }

    /// Performs actions until `perform` returns true for the last one.
    pub(super) fn control(self: &Arc<Self>, mut perform: impl FnMut(M::Action) -> bool) {
        loop {
            let action = self.driver.next_action(PATIENCE);
            for state in self.driver.take_passed() {
                tracing::debug!(?state, "a protection");
            }
            if self.is_abandoned.load(Ordering::Acquire) {
                return;
            }
            let Some(action) = action else { continue };
            tracing::debug!(?action, "a protection");
            if perform(action) {
                return;
            }
        }
    }

    /// Whether the arbiter can be asked now. A planned takeover checks this first.
    pub(super) fn is_arbiter_in_reach(&self) -> bool {
        let looked = threads::caught("Claims", || self.claims.look()).map_err(|panic| panic.to_string());
        match looked.and_then(|looked| looked) {
            Ok(()) => true,
            Err(why) => {
                self.log(format!("a planned takeover needs the arbiter: {why}"));
                false
            }
        }
    }

    /// Runs `act`, which may take long, in its own thread, and feeds the resulting event. A panic, or a missing
    /// thread, counts as the event `failed`.
    pub(super) fn beside(
        self: &Arc<Self>,
        name: &str,
        act: impl FnOnce() -> Result<M::Event, String> + Send + 'static,
        failed: M::Event,
    ) {
        let this = Arc::clone(self);
        let told = name.to_owned();
        let work = move || {
            let ended = threads::caught(&told, act).map_err(|error| error.to_string());
            let event = ended.and_then(|ended| ended).unwrap_or_else(|why| {
                this.note(format!("{told}: {why}"));
                failed
            });
            this.tell(event);
        };
        let (this, told) = (Arc::clone(self), name.to_owned());
        // `work` catches its own panics, so only the VMM's hook for new threads can panic.
        let died = move |error| {
            this.note(format!("{told}: {error}"));
            this.tell(failed);
        };
        if let Err(error) = self.spawn(ThreadRole::ProtectionStep.of(name), work, died) {
            self.note(format!("{name}: the host refuses a thread: {error}"));
            self.tell(failed);
        }
    }

    /// Starts a thread of this contact, which runs the VMM's hook first. `died` gets a panic.
    pub(super) fn spawn(
        &self,
        thread: NewThread,
        work: impl FnOnce() + Send + 'static,
        died: impl FnOnce(MigrationError) + Send + 'static,
    ) -> Result<JoinHandle<()>, MigrationError> {
        hooked(self.hook.as_ref(), || threads::spawn(thread, work, died))
    }

    /// Sends a message. A peer that does not read counts as the event `lost`.
    ///
    /// A connection that the peer has closed is reported by [`Runner::read`]: the peer's last message may wait in it,
    /// and it must be known before the end is.
    pub(super) fn send(&self, message: Message, lost: M::Event) {
        match self.link.send(message) {
            Ok(()) => {}
            Err(ContactError::Transport(why @ TransportError::Reset { .. })) => {
                tracing::debug!(%why, "a protection's message was not sent");
            }
            Err(why) => {
                self.note_end(why);
                self.tell(lost);
            }
        }
    }

    /// Reads the peer's messages until the connection ends.
    pub(super) fn read(
        &self,
        mut event: impl FnMut(Message) -> M::Event,
        lost: M::Event,
        misbehaved: M::Event,
    ) {
        loop {
            // If a peer sends faster than this side performs actions, reading stops here, so that the queue is
            // bounded.
            while self.driver.waiting_actions() > MOST_WAITING && !self.link.is_closed() {
                std::thread::sleep(LOOK);
            }
            match self.link.read() {
                Ok(message) => self.tell(event(message)),
                Err(why) => {
                    let is_peers = matches!(why, ContactError::Wire(_));
                    // After this side has closed the connection, the read error would hide the actual cause.
                    if !self.link.is_closed() {
                        self.note_end(why);
                    }
                    return self.tell(if is_peers { misbehaved } else { lost });
                }
            }
        }
    }
}
