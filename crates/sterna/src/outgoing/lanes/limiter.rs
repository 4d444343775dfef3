//! `max-bandwidth`: limits all lanes together, in windows of 100 ms as QEMU does (specs/stream.md §8).
//!
//! The limit is off while the guest is stopped.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

const WINDOW: Duration = Duration::from_millis(100);

/// The bandwidth limit, shared by all lanes of one migration.
pub(in crate::outgoing) struct Limiter {
    state: Mutex<LimiterState>,
    changed: Condvar,
}

struct LimiterState {
    /// Bytes for each window; `None`: no limit.
    budget: Option<u64>,
    window: Instant,
    spent: u64,
    /// The guest is stopped, or the migration ends: no thread waits.
    open: bool,
}

impl Limiter {
    /// A limit of `bytes_per_second`; 0 means no limit.
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        let state =
            LimiterState { budget: budget(bytes_per_second), window: Instant::now(), spent: 0, open: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Changes the limit, also for lanes that wait.
    pub(crate) fn set(&self, bytes_per_second: u64) {
        let mut state = self.state.lock();
        // Bytes that were sent under another limit, or under none, do not count as spent under this one.
        *state = LimiterState {
            budget: budget(bytes_per_second),
            window: Instant::now(),
            spent: 0,
            open: state.open,
        };
        drop(state);
        self.changed.notify_all();
    }

    /// The bytes that may be sent in one window; `None` without a limit.
    ///
    /// More bytes in one step would delay the following ones for longer than a window.
    #[cfg(feature = "rdma")]
    pub(crate) fn burst(&self) -> Option<u64> {
        let state = self.state.lock();
        state.budget.filter(|_| !state.open)
    }

    /// Whether [`Limiter::take`] would wait now.
    #[cfg(feature = "postcopy")]
    pub(crate) fn is_spent(&self) -> bool {
        let mut state = self.state.lock();
        let Some(budget) = state.budget.filter(|_| !state.open) else { return false };
        state.pass(budget, Instant::now());
        state.spent >= budget
    }

    /// Switches the limit off: no thread waits from now on.
    pub(crate) fn open(&self) {
        self.state.lock().open = true;
        self.changed.notify_all();
    }

    /// Switches the limit on again.
    #[cfg(any(feature = "postcopy", feature = "reconnect"))]
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        (state.open, state.window, state.spent) = (false, Instant::now(), 0);
    }

    /// Takes `bytes` from the window's budget. Gives the time that it waited for a window with budget left.
    ///
    /// One batch may exceed a window's budget. The next ones wait until the excess is paid back.
    pub(crate) fn take(&self, bytes: u64) -> Duration {
        let mut state = self.state.lock();
        let mut began = None;
        while let Some(budget) = state.budget.filter(|_| !state.open) {
            let now = Instant::now();
            state.pass(budget, now);
            if state.spent < budget {
                break;
            }
            began.get_or_insert(now);
            let left = WINDOW.saturating_sub(now.duration_since(state.window));
            self.changed.wait_for(&mut state, left);
        }
        state.spent += bytes;
        began.map_or(Duration::ZERO, |began: Instant| began.elapsed())
    }
}

impl LimiterState {
    /// Subtracts the budget of the windows that have passed.
    fn pass(&mut self, budget: u64, now: Instant) {
        let passed = now.duration_since(self.window);
        if passed >= WINDOW {
            let windows = (passed.as_nanos() / WINDOW.as_nanos()) as u64;
            self.spent = self.spent.saturating_sub(budget.saturating_mul(windows));
            self.window += WINDOW * u32::try_from(windows).unwrap_or(u32::MAX);
        }
    }
}

fn budget(bytes_per_second: u64) -> Option<u64> {
    (bytes_per_second > 0).then_some((bytes_per_second / 10).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn take_over_the_budget_waits_for_windows() {
        let limiter = Limiter::new(10_000_000);
        let began = Instant::now();
        for _ in 0..4 {
            limiter.take(1_000_000);
        }
        // The bytes need four windows. The fourth cannot start before three windows have passed.
        assert!(began.elapsed() >= WINDOW * 2, "{:?}", began.elapsed());
    }

    #[test]
    fn overdraft_is_paid_back() {
        let limiter = Limiter::new(10_000_000);
        limiter.take(3_000_000);
        let began = Instant::now();
        limiter.take(1);
        assert!(began.elapsed() >= WINDOW, "{:?}", began.elapsed());
    }

    #[test]
    fn open_frees_those_who_wait() {
        let limiter = Limiter::new(10);
        limiter.take(1_000_000_000);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| limiter.take(1));
            limiter.open();
            waiting.join().unwrap();
        });
    }

    #[test]
    fn limit_set_after_none_starts_without_debt() {
        let limiter = Limiter::new(0);
        limiter.take(1 << 50);
        limiter.set(10_000_000);
        assert_eq!(limiter.take(1), Duration::ZERO);
    }

    #[test]
    fn burst_is_a_windows_worth_and_none_when_nobody_waits() {
        let limiter = Limiter::new(10_000_000);
        assert_eq!(limiter.burst(), Some(1_000_000));
        limiter.open();
        assert_eq!(limiter.burst(), None);
        assert_eq!(Limiter::new(0).burst(), None);
    }

    #[test]
    fn no_limit_never_waits() {
        assert_eq!(Limiter::new(0).take(u64::MAX / 2), Duration::ZERO);
    }
}
