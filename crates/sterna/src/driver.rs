//! Runs a handover machine of `sterna-proto`: threads feed it events, one thread performs its actions.
//!
//! Whoever learns something feeds it at once, so that the machine alone decides what came first: a
//! cancel that arrives before the commit wins over it, one that arrives after it is refused. What is
//! to be done about it waits in a queue for the control thread.

use std::collections::VecDeque;
use std::fmt::{Debug, Display};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

/// What the source's and the destination's machine have in common.
pub(crate) trait Machine {
    type Event: Copy + Debug;
    type Action;
    type Refusal: Display;
    type State: Copy + PartialEq;
    const TICK: Self::Event;
    fn handle(&mut self, now: Duration, event: Self::Event) -> Result<Vec<Self::Action>, Self::Refusal>;
    fn state(&self) -> Self::State;
    fn deadline(&self) -> Option<Duration>;
    /// Whether nothing that happens now changes anything: what ends then is no trouble. Only a protection's machines say so.
    fn is_over(&self) -> bool {
        false
    }
}

/// A machine, its clock, and what it wants done.
pub(crate) struct Driver<M: Machine> {
    inner: Mutex<Inner<M>>,
    changed: Condvar,
    began: Instant,
}

struct Inner<M: Machine> {
    machine: M,
    actions: VecDeque<M::Action>,
    /// States passed through and not yet told to the observer.
    passed: VecDeque<M::State>,
    watch: Watch<M>,
}

/// Called after every event that the machine took, before another thread can feed or inspect it.
type Watch<M> = Box<dyn Fn(&M) + Send>;

/// Why a wait ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Waited<T> {
    /// What was waited for is there.
    Got(T),
    /// The machine wants something done first.
    Interrupted,
    /// Neither came in time.
    TimedOut,
}

impl<M: Machine> Driver<M> {
    /// Drives `machine`, whose time zero is now. `watch` sees it after every event that it took, before anybody else
    /// can feed or inspect it.
    pub(crate) fn new(machine: M, watch: impl Fn(&M) + Send + 'static) -> Self {
        let watch: Watch<M> = Box::new(watch);
        let inner = Inner { machine, actions: VecDeque::new(), passed: VecDeque::new(), watch };
        Self { inner: Mutex::new(inner), changed: Condvar::new(), began: Instant::now() }
    }

    /// Since the machine's time zero.
    pub(crate) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Tells the machine what happened; any thread.
    pub(crate) fn feed(&self, event: M::Event) -> Result<M::State, M::Refusal> {
        let mut inner = self.inner.lock();
        let result = inner.feed(self.now(), event);
        let state = inner.machine.state();
        drop(inner);
        self.changed.notify_all();
        result.map(|()| state)
    }

    /// Reads from the machine.
    pub(crate) fn inspect<T>(&self, inspect: impl FnOnce(&M) -> T) -> T {
        inspect(&self.inner.lock().machine)
    }

    /// Takes the states that were passed since the last call, oldest first.
    pub(crate) fn take_passed(&self) -> Vec<M::State> {
        self.inner.lock().passed.drain(..).collect()
    }

    /// Waits for the next action, at most `patience`; ticks the machine when its deadline passes. `None`
    /// also when a state was passed: the observer is to be told at once.
    pub(crate) fn next_action(&self, patience: Duration) -> Option<M::Action> {
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

    /// Waits until `check` has something, at most `patience`; gives way to actions.
    pub(crate) fn wait<T>(&self, patience: Duration, mut check: impl FnMut() -> Option<T>) -> Waited<T> {
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

    /// Something that a `check` of [`Driver::wait`] reads has changed.
    pub(crate) fn nudge(&self) {
        // Taken, so that the change cannot fall between a check and its sleep.
        drop(self.inner.lock());
        self.changed.notify_all();
    }

    fn sleep(&self, inner: &mut MutexGuard<'_, Inner<M>>, now: Duration, until: Duration) {
        let until = inner.machine.deadline().map_or(until, |deadline| deadline.min(until));
        let patience = until.saturating_sub(now).max(Duration::from_micros(100));
        self.changed.wait_for(inner, patience);
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

impl Machine for sterna_proto::source::Source {
    type Event = sterna_proto::source::Event;
    type Action = sterna_proto::source::Action;
    type Refusal = sterna_proto::source::Refusal;
    type State = sterna_proto::source::State;
    const TICK: Self::Event = sterna_proto::source::Event::Tick;
    fn handle(&mut self, now: Duration, event: Self::Event) -> Result<Vec<Self::Action>, Self::Refusal> {
        Self::handle(self, now, event)
    }
    fn state(&self) -> Self::State {
        Self::state(self)
    }
    fn deadline(&self) -> Option<Duration> {
        Self::deadline(self)
    }
}

impl Machine for sterna_proto::destination::Destination {
    type Event = sterna_proto::destination::Event;
    type Action = sterna_proto::destination::Action;
    type Refusal = sterna_proto::destination::Refusal;
    type State = sterna_proto::destination::State;
    const TICK: Self::Event = sterna_proto::destination::Event::Tick;
    fn handle(&mut self, now: Duration, event: Self::Event) -> Result<Vec<Self::Action>, Self::Refusal> {
        Self::handle(self, now, event)
    }
    fn state(&self) -> Self::State {
        Self::state(self)
    }
    fn deadline(&self) -> Option<Duration> {
        Self::deadline(self)
    }
}
