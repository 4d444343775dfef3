//! What both sides have in common: the thread that performs a machine's actions, and the ones that work beside it.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sterna_proto::replica::Ruling;
use sterna_wire::replica::ArbiterIdentity;

use super::error::ContactError;
use super::link::Link;
use crate::driver::{Driver, Machine};
use crate::threads;

/// How long the control thread sleeps at most when nothing is due.
const PATIENCE: Duration = Duration::from_secs(1);

/// Texts that are remembered as logged.
const LOGGED: usize = 16;

/// The arbiter's claim of this protection's generation, for this side.
pub trait Claims: Send + Sync {
    /// Asks the arbiter. Asking again must be safe: an answer may have been lost.
    ///
    /// # Errors
    /// Why there is no ruling; the arbiter may have ruled all the same.
    fn claim(&self) -> Result<Ruling, String>;

    /// Which arbiter it is. Both sides are asked when they greet each other, and a protection begins only if they ask one
    /// ([`ArbiterIdentity::is_same`]). By default nothing is said of it, and two sides that say nothing may go on.
    ///
    /// # Errors
    /// It cannot be asked now.
    fn arbiter(&self) -> Result<ArbiterIdentity, String> {
        Ok(ArbiterIdentity::default())
    }

    /// Whether it can be asked now, as far as that can be known. Claims nothing.
    ///
    /// # Errors
    /// Why it cannot.
    fn look(&self) -> Result<(), String> {
        Ok(())
    }

    /// Both sides have read what [`Claims::arbiter`] found. Called at the primary alone.
    fn arbiters_compared(&self) {}
}

impl<F: Fn() -> Result<Ruling, String> + Send + Sync> Claims for F {
    fn claim(&self) -> Result<Ruling, String> {
        self()
    }
}

/// What is seen from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContactState<S, O> {
    /// Where the machine stands.
    pub state: S,
    /// How the protection ended, if it has.
    pub outcome: Option<O>,
    /// Why contact was lost (by what came first), or why a step failed; the last one.
    pub trouble: Option<String>,
}

/// A side's machine with what its threads share.
pub(super) struct Runner<M: Machine> {
    pub(super) driver: Driver<M>,
    pub(super) link: Link,
    pub(super) claims: Arc<dyn Claims>,
    pub(super) trouble: parking_lot::Mutex<Option<String>>,
    /// What was logged last, so that what is tried again and again is logged once.
    logged: parking_lot::Mutex<VecDeque<String>>,
    /// What ended the contact, or the following, is noted: what ends after it follows from that.
    has_ended: AtomicBool,
    /// Nobody performs actions any more: as if this side had died.
    is_abandoned: AtomicBool,
}

impl<M> Runner<M>
where
    M: Machine + Send + 'static,
    M::Event: Send,
    M::Action: Copy + Debug + Send,
    M::State: Debug + Send,
{
    pub(super) fn new(machine: M, link: Link, claims: Arc<dyn Claims>) -> Arc<Self> {
        let driver = Driver::new(machine, |_: &M| {});
        let (trouble, logged, has_ended, is_abandoned) = Default::default();
        Arc::new(Self { driver, link, claims, trouble, logged, has_ended, is_abandoned })
    }

    /// From now on this side is silent and does nothing, as if it had died.
    pub(super) fn abandon(&self) {
        self.is_abandoned.store(true, Ordering::Release);
        self.link.close();
    }

    /// An event that cannot be refused: what happened has happened.
    pub(super) fn tell(&self, event: M::Event) {
        if let Err(refusal) = self.driver.feed(event) {
            tracing::error!(%refusal, "a protection's machine refused what happened");
        }
    }

    /// Notes what an operator should know.
    pub(super) fn note(&self, trouble: impl ToString) {
        *self.trouble.lock() = Some(self.log(trouble.to_string()));
    }

    fn log(&self, trouble: String) -> String {
        let mut logged = self.logged.lock();
        // An arbiter that is out of reach is asked again and again, and so is a guest that does not stop.
        if !logged.contains(&trouble) {
            tracing::warn!(trouble, "a protection");
            if logged.len() == LOGGED {
                logged.pop_front();
            }
            logged.push_back(trouble.clone());
        }
        trouble
    }

    /// Notes that a connection has ended; the first reason counts. Behind the protection's end that is no trouble: the other side closes
    /// what is not needed any more.
    pub(super) fn note_end(&self, why: impl ToString) {
        match self.driver.inspect(M::is_over) {
            true => tracing::debug!(why = why.to_string(), "behind the end of a protection"),
            false if self.has_ended.swap(true, Ordering::AcqRel) => drop(self.log(why.to_string())),
            false => self.note(why),
        }
    }

    /// Performs actions until the last one. `perform` says whether it was that.
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

    /// Whether the arbiter can be asked now, where a planned takeover is about to need it.
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

    /// Does what may take long, and tells what came of it. If it panics or gets no thread, that is a failure, too.
    pub(super) fn beside(
        self: &Arc<Self>,
        name: &str,
        act: impl FnOnce() -> Result<M::Event, String> + Send + 'static,
        failed: M::Event,
    ) {
        let this = Arc::clone(self);
        let begun = std::thread::Builder::new().name(name.to_owned()).spawn({
            let name = name.to_owned();
            move || {
                let ended = threads::caught(&name, act).map_err(|error| error.to_string());
                let event = ended.and_then(|ended| ended).unwrap_or_else(|why| {
                    this.note(format!("{name}: {why}"));
                    failed
                });
                this.tell(event);
            }
        });
        if let Err(error) = begun {
            self.note(format!("{name}: the host refuses a thread: {error}"));
            self.tell(failed);
        }
    }

    /// Reads what the peer says, until the connection ends.
    pub(super) fn read(
        &self,
        mut event: impl FnMut(sterna_wire::replica::Message) -> M::Event,
        lost: M::Event,
        misbehaved: M::Event,
    ) {
        loop {
            match self.link.read() {
                Ok(message) => self.tell(event(message)),
                Err(why) => {
                    let is_peers = matches!(why, ContactError::Wire(_));
                    // What this side has ended would hide why.
                    if !self.link.is_closed() {
                        self.note_end(why);
                    }
                    return self.tell(if is_peers { misbehaved } else { lost });
                }
            }
        }
    }
}
