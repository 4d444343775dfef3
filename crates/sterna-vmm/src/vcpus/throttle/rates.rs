//! How fast each vCPU dirties memory, as its ring says.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::ThrottleClock;
use sterna_ram::PAGE_SIZE;
use sterna_ram::dirty::KvmDirtyRing;

/// The time over which dirty rates are measured: QEMU's `vcpu-dirty-limit-period`.
const PERIOD: Duration = Duration::from_secs(1);
/// The least time from which a rate is told.
const SHORTEST: Duration = ThrottleClock::SLICE;

/// Measures all vCPUs' rates while tracking runs.
#[derive(Debug, Default)]
pub(super) struct Rates(Mutex<LastPeriod>);

/// Dirty rates of the last period.
#[derive(Debug, Default)]
struct LastPeriod {
    /// When, and what each vCPU had reported then; none while tracking does not run.
    since: Option<(Instant, Vec<u64>)>,
    /// Bytes per second; empty until a period is over.
    bytes: Vec<u64>,
}

impl Rates {
    /// Notes what the rings have named so far. To be called more often than a period ends.
    pub(super) fn measure(&self, ring: &KvmDirtyRing) {
        let mut last = self.0.lock();
        let Some((begun, reported_then)) = ring.begun() else {
            *last = LastPeriod::default();
            return;
        };
        // Tracking that ended and began again between two looks is another.
        if last.since.as_ref().is_none_or(|(since, _)| *since < begun) {
            *last = LastPeriod { since: Some((begun, reported_then)), bytes: Vec::new() };
        }
        let (now, reported) = (Instant::now(), ring.reported());
        let Some((since, before)) = &last.since else { return };
        let time = now.saturating_duration_since(*since);
        if time >= PERIOD {
            let bytes = rates(before, &reported, time);
            *last = LastPeriod { since: Some((now, reported)), bytes };
        }
    }

    /// Each vCPU's rate, bytes per second: over the last period, or since tracking began if none is over. Empty where
    /// it does not run, or has hardly begun.
    pub(super) fn get(&self, ring: &KvmDirtyRing) -> Vec<u64> {
        self.measure(ring);
        let last = self.0.lock();
        match &last.since {
            Some((since, before)) if last.bytes.is_empty() && since.elapsed() >= SHORTEST => {
                rates(before, &ring.reported(), since.elapsed())
            }
            _ => last.bytes.clone(),
        }
    }
}

/// Bytes per second of vCPUs that had reported so many pages `before`, and so many `now`.
fn rates(before: &[u64], now: &[u64], time: Duration) -> Vec<u64> {
    let rate = |(now, before): (&u64, &u64)| {
        let bytes = u128::from(now.saturating_sub(*before)) * PAGE_SIZE as u128;
        u64::try_from(bytes * 1_000_000_000 / time.as_nanos().max(1)).unwrap_or(u64::MAX)
    };
    now.iter().zip(before).map(rate).collect()
}
