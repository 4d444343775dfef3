//! Time limits for tests on a busy machine: time counts in proportion to the free cores.

use std::time::{Duration, Instant};

/// Time as it would have passed on a quiet machine.
///
/// An interval in which four threads compete for each core counts a quarter. A program that hangs
/// on a quiet machine still exceeds its limit, as with a clock. A program that waits for a core
/// gets additional time for the wait.
#[derive(Debug, Clone)]
pub struct CoreTime {
    began: Instant,
    looked: Instant,
    counted: Duration,
}

impl Default for CoreTime {
    fn default() -> Self {
        let now = Instant::now();
        Self { began: now, looked: now, counted: Duration::ZERO }
    }
}

impl CoreTime {
    /// Counts the time since the last call, in proportion to the present load.
    ///
    /// Call this often in comparison with the limit, because the load is sampled only here.
    pub fn look(&mut self) -> Duration {
        self.count(Instant::now(), share(cores(), runnable().unwrap_or(1)))
    }

    /// The time that was counted until the last call of [`CoreTime::look`].
    pub fn counted(&self) -> Duration {
        self.counted
    }

    /// The time that has passed on the clock, whatever the load.
    pub fn by_the_clock(&self) -> Duration {
        self.began.elapsed()
    }

    fn count(&mut self, now: Instant, share: f64) -> Duration {
        self.counted += now.saturating_duration_since(self.looked).mul_f64(share);
        self.looked = now;
        self.counted
    }
}

/// A time limit that must expire in a test, for this machine at its present load.
///
/// On a quiet machine it is `quiet`. Where more than two threads wait for each core, on average over the last minute,
/// it grows in proportion. Otherwise the limit would also end what is only slow.
pub fn stretched(quiet: Duration) -> Duration {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = text.split(' ').next().and_then(|load| load.parse::<f64>().ok()).unwrap_or(0.0);
    quiet.mul_f64(growth(load, cores()))
}

fn growth(load: f64, cores: usize) -> f64 {
    (load / (2.0 * cores as f64)).max(1.0)
}

/// The share of a core that one of `runnable` threads gets.
fn share(cores: usize, runnable: usize) -> f64 {
    cores as f64 / runnable.max(cores) as f64
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Number of threads that run or wait for a core (proc_stat(5)).
fn runnable() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    text.lines().find_map(|line| line.strip_prefix("procs_running ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_grows_only_on_a_busy_machine() {
        assert!([0.0, 1.0, 4.0].iter().all(|load| growth(*load, 2) == 1.0));
        assert_eq!(growth(16.0, 2), 4.0);
    }

    #[test]
    fn time_on_a_busy_machine_counts_in_part() {
        let mut time = CoreTime::default();
        let began = time.began;
        let at = |seconds| began + Duration::from_secs(seconds);

        assert_eq!(time.count(at(100), share(2, 1)), Duration::from_secs(100));
        assert_eq!(time.count(at(700), share(2, 30)), Duration::from_secs(140));
        assert_eq!(time.count(at(710), share(2, 2)), Duration::from_secs(150));
        assert_eq!(time.counted(), Duration::from_secs(150));
    }

    #[test]
    fn runnable_threads_are_known() {
        // The thread of this test is runnable.
        assert!(runnable().is_some_and(|count| count >= 1));
    }
}
