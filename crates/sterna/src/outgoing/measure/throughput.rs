//! The throughput: sent bytes per second of real time. Operators compare it with `max-bandwidth` and with a
//! link's rate.
//!
//! The bandwidth that the precopy policy uses ([`Meter`](crate::precopy::Meter)) counts only the time in which
//! bytes moved. Where `max-bandwidth` limits the lanes, that is the speed at which sockets accept bursts:
//! hundreds of times the rate at which bytes leave the host.

use std::time::Duration;

use crate::precopy::SHOWN_HALF_LIFE;

/// Sums that decay: by half after [`SHOWN_HALF_LIFE`].
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::outgoing) struct Throughput {
    bytes: f64,
    seconds: f64,
}

impl Throughput {
    /// The sums after `bytes` more were sent in the time `passed`.
    pub(super) fn and(&self, bytes: u64, passed: Duration) -> Self {
        let keep = 0.5f64.powf(passed.as_secs_f64() / SHOWN_HALF_LIFE.as_secs_f64());
        Self { bytes: self.bytes * keep + bytes as f64, seconds: self.seconds * keep + passed.as_secs_f64() }
    }

    /// Bytes per second; 0 before any time has passed.
    pub(super) fn bytes_per_second(&self) -> u64 {
        if self.seconds > 0.0 { (self.bytes / self.seconds) as u64 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_millis(100);

    #[test]
    fn throughput_of_bursts_is_what_went_out_in_all_the_time() {
        // Each window has 500 kB at one instant.
        let steady = (0..50).fold(Throughput::default(), |sum, _| sum.and(500_000, WINDOW));

        assert!(steady.bytes_per_second().abs_diff(5_000_000) < 10, "{steady:?}");
    }

    #[test]
    fn throughput_fades_when_nothing_goes_out_any_more() {
        let fast = (0..50).fold(Throughput::default(), |sum, _| sum.and(500_000, WINDOW));

        let silent = (0..20).fold(fast, |sum, _| sum.and(0, WINDOW));

        assert!(silent.bytes_per_second() < fast.bytes_per_second() * 2 / 3, "{silent:?}");
        assert_eq!(Throughput::default().bytes_per_second(), 0);
    }
}
