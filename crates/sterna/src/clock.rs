//! Clocks for the handover machines. One of them also counts the time while the host is suspended.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Longest sleep of a waiting thread, if the clock may jump. A jump wakes no thread.
const LONGEST_WAIT: Duration = Duration::from_millis(10);

type Read = Box<dyn Fn() -> Duration + Send + Sync>;

/// Time since a fixed moment.
pub struct Clock {
    read: Read,
    longest_wait: Duration,
}

impl Clock {
    /// Counts while the host is awake (CLOCK_MONOTONIC). Limits for waits on a peer use this clock.
    pub fn awake() -> Self {
        let began = Instant::now();
        Self { read: Box::new(move || began.elapsed()), longest_wait: Duration::MAX }
    }

    /// Counts also while the host is suspended (CLOCK_BOOTTIME), because the peer's clock advances meanwhile.
    ///
    /// A thread that waits for a deadline sleeps by CLOCK_MONOTONIC. It therefore reads this clock every 10 ms, and
    /// notices an expired deadline within 10 ms after a suspend.
    pub fn with_suspends() -> Self {
        let began = since_boot();
        Self { read: Box::new(move || since_boot().saturating_sub(began)), longest_wait: LONGEST_WAIT }
    }

    /// Reads time from `read`, which may jump forward. Tests use it.
    pub fn injected(read: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self { read: Box::new(read), longest_wait: LONGEST_WAIT }
    }

    /// Time since this clock was created.
    pub fn now(&self) -> Duration {
        (self.read)()
    }

    /// The longest that a waiting thread may sleep before it reads this clock again.
    pub fn longest_wait(&self) -> Duration {
        self.longest_wait
    }
}

fn since_boot() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    // Both fields are non-negative, because they are a time since boot.
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_clock_is_the_kernels_that_counts_suspends() {
        let clock = Clock::with_suspends();
        let (began, before) = (since_boot(), clock.now());
        std::thread::sleep(Duration::from_millis(20));
        let passed = clock.now() - before;
        assert!(passed >= Duration::from_millis(20) && passed <= since_boot() - began + before + passed);
        // CLOCK_BOOTTIME includes the time of suspends, CLOCK_MONOTONIC does not. So the former is never smaller.
        let awake = clock_gettime(ClockId::Monotonic);
        assert!(since_boot() >= Duration::new(awake.tv_sec.unsigned_abs(), 0));
    }
}
