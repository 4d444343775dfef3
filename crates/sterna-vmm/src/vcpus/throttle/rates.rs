//! Measures each vCPU's dirty rate from the pages that its ring reports.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::ThrottleClock;
use sterna_ram::PAGE_SIZE;
use sterna_ram::dirty::KvmDirtyRing;

/// Time over which a dirty rate is measured: QEMU's `vcpu-dirty-limit-period`.
const PERIOD: Duration = Duration::from_secs(1);
/// Shortest time from which a rate is computed.
const SHORTEST: Duration = ThrottleClock::SLICE;

/// The dirty rates of all vCPUs while tracking runs.
#[derive(Debug, Default)]
pub(super) struct Rates(Mutex<LastPeriod>);

/// The dirty rates of the last complete period.
#[derive(Debug, Default)]
struct LastPeriod {
    /// Start of the current period, with each vCPU's page count then. `None` while tracking does not run.
    since: Option<(Instant, Vec<u64>)>,
    /// Bytes per second for each vCPU. Empty until the first period is complete.
    bytes: Vec<u64>,
}

impl Rates {
    /// Records the rings' page counts. The caller calls this more often than once per period.
    pub(super) fn measure(&self, ring: &KvmDirtyRing) {
        let mut last = self.0.lock();
        let Some((begun, reported_then)) = ring.begun() else {
            *last = LastPeriod::default();
            return;
        };
        // Tracking ended and began again between two calls, so the old counts are invalid.
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

    /// Each vCPU's dirty rate in bytes per second, over the last period. If no period is complete: since
    /// tracking began. Empty while tracking does not run, and shortly after it begins.
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

/// Dirty rates in bytes per second. The rings had reported `before` pages, and now have reported `now`.
fn rates(before: &[u64], now: &[u64], time: Duration) -> Vec<u64> {
    let rate = |(now, before): (&u64, &u64)| {
        let bytes = u128::from(now.saturating_sub(*before)) * PAGE_SIZE as u128;
        u64::try_from(bytes * 1_000_000_000 / time.as_nanos().max(1)).unwrap_or(u64::MAX)
    };
    now.iter().zip(before).map(rate).collect()
}
