//! The gate at which vCPU threads wait. It records which threads may run, which are parked, and why the guest
//! ended.
//!
//! The machine sets the requested state ([`Wanted`]), and every vCPU thread compares it with its own. A
//! thread is *parked* when its vCPU has left the guest with its pending I/O completed. It stays parked until
//! the gate opens. Changes to `wanted` and to a vCPU's immediate-exit flag happen under one lock, so no kick
//! is lost.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::end_reason::EndReason;

/// The state that the machine requests of its vCPU threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Wanted {
    /// Leave the guest and park.
    Park,
    /// Enter and run the guest.
    Run,
    /// Leave the guest and end the thread.
    Quit,
}

#[derive(Debug)]
pub(crate) struct GateState {
    wanted: Wanted,
    parked: usize,
    threads: usize,
    pub(crate) ended: Option<EndReason>,
}

#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
    /// Copy of `state.wanted` that the run loop reads without the lock.
    glance: AtomicU8,
}

impl Gate {
    pub(crate) fn new() -> Self {
        let state = GateState { wanted: Wanted::Park, parked: 0, threads: 0, ended: None };
        Self { state: Mutex::new(state), changed: Condvar::new(), glance: AtomicU8::new(Wanted::Park as u8) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock()
    }

    /// Whether a vCPU in the guest may stay there.
    pub(crate) fn may_run(&self) -> bool {
        self.glance.load(Ordering::Acquire) == Wanted::Run as u8
    }

    /// Whether the machine has requested that the guest runs.
    pub(crate) fn running(&self) -> bool {
        self.lock().wanted == Wanted::Run
    }

    /// Counts a started thread, which will call [`Gate::wait`].
    pub(crate) fn enter(&self) {
        self.lock().threads += 1;
    }

    /// Sets the requested state. `before_release` runs under the lock, to kick vCPUs.
    pub(crate) fn want(&self, wanted: Wanted, before_release: impl FnOnce()) {
        let mut state = self.lock();
        if state.wanted != Wanted::Quit {
            state.wanted = wanted;
            self.glance.store(wanted as u8, Ordering::Release);
        }
        before_release();
        self.changed.notify_all();
    }

    /// Records that the guest ended. No vCPU runs until the guest is replaced. Only the first reason is kept.
    pub(crate) fn end(&self, reason: EndReason, before_release: impl FnOnce()) {
        {
            let mut state = self.lock();
            tracing::info!(%reason, "guest ended");
            state.ended.get_or_insert(reason);
        }
        self.want(Wanted::Park, before_release);
    }

    /// Undoes [`Gate::enter`] for a thread that could not be started.
    pub(crate) fn leave(&self) {
        self.lock().threads -= 1;
    }

    /// Parks the calling vCPU thread. True: run, after `before_run` under the lock. False: end the thread,
    /// after `before_end` under the lock.
    pub(crate) fn wait(&self, before_run: impl FnOnce(), before_end: impl FnOnce()) -> bool {
        let mut state = self.lock();
        state.parked += 1;
        self.changed.notify_all();
        while state.wanted == Wanted::Park {
            self.changed.wait(&mut state);
        }
        state.parked -= 1;
        if state.wanted == Wanted::Quit {
            state.threads -= 1;
            before_end();
            return false;
        }
        before_run();
        true
    }

    /// Calls `then` under the lock if the guest is requested to run.
    pub(crate) fn if_running(&self, then: impl FnOnce()) {
        let state = self.lock();
        if state.wanted == Wanted::Run {
            then();
        }
    }

    /// Sleeps on a vCPU thread outside the guest. The sleep ends when the guest must not run, or `wanted` is
    /// false.
    pub(crate) fn sleep(&self, time: Duration, wanted: impl Fn() -> bool) {
        let deadline = Instant::now() + time;
        let mut state = self.lock();
        while state.wanted == Wanted::Run && wanted() {
            let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
            else {
                return;
            };
            self.changed.wait_for(&mut state, left);
        }
    }

    /// Wakes every thread in [`Gate::sleep`] so that it checks `wanted` again.
    pub(crate) fn wake_sleepers(&self) {
        let _state = self.lock();
        self.changed.notify_all();
    }

    /// Returns when every vCPU thread is parked or has ended.
    pub(crate) fn wait_parked(&self) {
        let mut state = self.lock();
        while state.parked < state.threads {
            self.changed.wait(&mut state);
        }
    }

    /// Waits until the guest has ended. None after `limit`.
    pub(crate) fn wait_ended(&self, limit: Duration) -> Option<EndReason> {
        let deadline = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            if state.ended.is_some() && state.parked >= state.threads {
                return state.ended.clone();
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            self.changed.wait_for(&mut state, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    /// A vCPU thread that sleeps an hour whenever it is requested to run. [`Wanted::Quit`] ends it.
    fn sleeper(gate: &Gate, wanted: &AtomicBool, slept: &AtomicBool) {
        while gate.wait(|| {}, || {}) {
            slept.store(true, Ordering::Release);
            gate.sleep(HOUR, || wanted.load(Ordering::Acquire));
            slept.store(false, Ordering::Release);
            while gate.may_run() {
                std::thread::yield_now();
            }
        }
    }

    fn until(condition: impl Fn() -> bool) {
        while !condition() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn sleep_of_an_hour_ends_when_the_machine_stops() {
        let (gate, wanted, slept) = (Gate::new(), AtomicBool::new(true), AtomicBool::new(false));
        gate.enter();
        std::thread::scope(|scope| {
            scope.spawn(|| sleeper(&gate, &wanted, &slept));
            for _ in 0..20 {
                gate.want(Wanted::Run, || {});
                until(|| slept.load(Ordering::Acquire));
                gate.want(Wanted::Park, || {});
                gate.wait_parked(); // hangs if the sleep does not end
            }
            gate.want(Wanted::Run, || {});
            until(|| slept.load(Ordering::Acquire));
            gate.want(Wanted::Quit, || {});
        });
        assert!(!slept.load(Ordering::Acquire));
    }

    #[test]
    fn sleep_of_an_hour_ends_when_it_is_no_longer_wanted() {
        let (gate, wanted, slept) = (Gate::new(), AtomicBool::new(true), AtomicBool::new(false));
        gate.enter();
        std::thread::scope(|scope| {
            scope.spawn(|| sleeper(&gate, &wanted, &slept));
            gate.want(Wanted::Run, || {});
            until(|| slept.load(Ordering::Acquire));
            wanted.store(false, Ordering::Release);
            gate.wake_sleepers();
            until(|| !slept.load(Ordering::Acquire));
            gate.want(Wanted::Quit, || {});
        });
    }
}
