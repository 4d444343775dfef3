//! Runs a handover machine of `sterna-proto`: threads feed it events, one thread performs its actions.
//!
//! A thread feeds an event as soon as it learns it, so that the machine alone decides the order of events. A cancel
//! that arrives before the commit wins; a cancel that arrives after the commit is refused. The machine's actions wait
//! in a queue for the control thread.

use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Condvar;
use sterna_proto::machine::Machine;
use sterna_ram::engine_lock::{EngineGuard, EngineLock};

use crate::clock::Clock;

/// A handover machine with its clock and its queue of actions. No callback of the VMM runs under its lock.
pub struct Driver<M: Machine> {
    inner: EngineLock<Inner<M>>,
    changed: Condvar,
    clock: Clock,
}

struct Inner<M: Machine> {
    machine: M,
    actions: VecDeque<M::Action>,
    /// States that the machine has passed and that were not yet reported to the observer.
    passed: VecDeque<M::State>,
    watch: Watch<M>,
}

/// Called after every event that the machine accepted, before another thread can feed or inspect it.
type Watch<M> = Box<dyn Fn(&M) + Send>;

/// Why a wait ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Waited<T> {
    /// The awaited value.
    Got(T),
    /// The machine has an action that must be performed first.
    Interrupted,
    /// The time limit passed without a value or an action.
    TimedOut,
}

impl<M: Machine> Driver<M> {
    /// Drives `machine`, whose time zero is now.
    ///
    /// `watch` is called after every accepted event, before another thread can feed or inspect the machine. It runs
    /// under the driver's lock, so it must neither wait nor call the VMM.
    pub fn new(machine: M, watch: impl Fn(&M) + Send + 'static) -> Self {
        Self::with_clock(machine, Clock::awake(), watch)
    }

    /// As [`Driver::new`], with another clock.
    pub fn with_clock(machine: M, clock: Clock, watch: impl Fn(&M) + Send + 'static) -> Self {
        let watch: Watch<M> = Box::new(watch);
        let inner = Inner { machine, actions: VecDeque::new(), passed: VecDeque::new(), watch };
        Self { inner: EngineLock::new("driver", inner), changed: Condvar::new(), clock }
    }

    /// Time since the machine's time zero.
    pub fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Reports an event to the machine. Any thread may call it.
    pub fn feed(&self, event: M::Event) -> Result<M::State, M::Refusal> {
        self.feed_unless(event, |_| None)
    }

    /// Reports an event to the machine, unless `refuse` refuses it in the machine's present state.
    ///
    /// No other event comes between the check and the event.
    pub fn feed_unless(
        &self,
        event: M::Event,
        refuse: impl FnOnce(M::State) -> Option<M::Refusal>,
    ) -> Result<M::State, M::Refusal> {
        let mut inner = self.inner.lock();
        if let Some(refusal) = refuse(inner.machine.state()) {
            return Err(refusal);
        }
        let result = inner.feed(self.now(), event);
        let state = inner.machine.state();
        drop(inner);
        self.changed.notify_all();
        result.map(|()| state)
    }

    /// Reads from the machine, under the driver's lock.
    pub fn inspect<T>(&self, inspect: impl FnOnce(&M) -> T) -> T {
        inspect(&self.inner.lock().machine)
    }

    /// Returns the states that were passed since the last call, oldest first.
    pub fn take_passed(&self) -> Vec<M::State> {
        self.inner.lock().passed.drain(..).collect()
    }

    /// Waits for the next action, at most `patience`; ticks the machine when its deadline passes. Also returns `None`
    /// when a state was passed, so that the observer learns it immediately.
    pub fn next_action(&self, patience: Duration) -> Option<M::Action> {
        let until = self.now() + patience;
        let mut inner = self.inner.lock();
        loop {
            inner.tick(self.now());
            if let Some(action) = inner.actions.pop_front() {
                return Some(action);
            }
            let now = self.now();
            if now >= until || !inner.passed.is_empty() {
                return None;
            }
            self.sleep(&mut inner, now, until);
        }
    }

    /// Waits until `check` returns a value, at most `patience`. A queued action interrupts the wait.
    pub fn wait<T>(&self, patience: Duration, mut check: impl FnMut() -> Option<T>) -> Waited<T> {
        let until = self.now() + patience;
        let mut inner = self.inner.lock();
        loop {
            inner.tick(self.now());
            if !inner.actions.is_empty() {
                return Waited::Interrupted;
            }
            if let Some(got) = check() {
                return Waited::Got(got);
            }
            let now = self.now();
            if now >= until {
                return Waited::TimedOut;
            }
            self.sleep(&mut inner, now, until);
        }
    }

    /// Queues an action again whose wait was interrupted, behind the actions that interrupted it. An action that is queued
    /// already is not queued twice.
    pub(crate) fn put_back(&self, action: M::Action)
    where
        M::Action: PartialEq,
    {
        let mut inner = self.inner.lock();
        if !inner.actions.contains(&action) {
            inner.actions.push_back(action);
        }
    }

    /// Number of actions that are queued for the control thread.
    pub fn waiting_actions(&self) -> usize {
        self.inner.lock().actions.len()
    }

    /// Wakes waiting threads after a change of a value that a `check` of [`Driver::wait`] reads.
    pub fn nudge(&self) {
        // The lock is taken so that the change cannot fall between a check and its sleep.
        drop(self.inner.lock());
        self.changed.notify_all();
    }

    fn sleep(&self, inner: &mut EngineGuard<'_, Inner<M>>, now: Duration, until: Duration) {
        let until = inner.machine.deadline().map_or(until, |deadline| deadline.min(until));
        let patience =
            until.saturating_sub(now).min(self.clock.longest_wait()).max(Duration::from_micros(100));
        inner.wait_for(&self.changed, patience);
    }
}

impl<M: Machine> Inner<M> {
    fn feed(&mut self, now: Duration, event: M::Event) -> Result<(), M::Refusal> {
        let before = self.machine.state();
        let actions = self.machine.handle(now, event)?;
        self.actions.extend(actions);
        let after = self.machine.state();
        if after != before {
            self.passed.push_back(after);
        }
        (self.watch)(&self.machine);
        Ok(())
    }

    fn tick(&mut self, now: Duration) {
        if self.machine.deadline().is_some_and(|deadline| deadline <= now)
            && let Err(refusal) = self.feed(now, M::TICK)
        {
            tracing::error!(%refusal, "the handover machine refused a tick");
        }
    }
}
