//! The throttle: slows the guest's vCPUs down and measures each vCPU's dirty rate.
//!
//! # The model
//! Each vCPU has a [`ThrottleClock`], which decides when the vCPU must sleep and for how long. The vCPU
//! sleeps on its own thread, at the gate, so that stopping the machine ends the sleep immediately. A vCPU in
//! the guest does not check its clock. While a limit is set, the throttle's thread checks all clocks every
//! [`TICK`] and kicks the vCPUs that must sleep.
//!
//! While dirty rings are in use, the thread empties them at the same interval, so that they seldom fill. It
//! computes the vCPUs' dirty rates every second. Rings are in use while a migration or a measurement tracks
//! the guest's writes. At other times the rates are 0, and a dirty limit has no effect yet.
//!
//! Lock order: a vCPU's clock is the innermost lock. The gate's lock may be taken before it, never after it.

mod rates;
mod watch;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use sterna::{DirtyLimitTimes, ThrottleClock, ThrottleLimits, VcpuDirtyRate, VmError};
use sterna_ram::PAGE_SIZE;

use super::Vcpus;
use super::tracking::Tracking;
use rates::Rates;
use watch::Watch;

/// Time between two checks of the clocks.
const TICK: Duration = ThrottleClock::SLICE;
/// Time between two checks whether a migration has begun to use the rings.
const IDLE_TICK: Duration = Duration::from_millis(100);

/// The throttle of a machine's vCPUs.
pub(crate) struct Throttling {
    vcpus: Arc<Vcpus>,
    tracking: Arc<Tracking>,
    begin: Instant,
    percent: AtomicU8,
    /// One entry per vCPU.
    throttles: Vec<VcpuThrottle>,
    /// Number of changes of the limits. A vCPU that sleeps under an older number computes its sleep again.
    generation: AtomicU64,
    rates: Rates,
    quit: Mutex<bool>,
    /// Signals that `quit` is set, or that the first limit was set.
    changed: Condvar,
}

#[derive(Default)]
struct VcpuThrottle {
    brake: Mutex<ThrottleClock>,
    /// Limit in bytes per second; 0 for none.
    dirty_limit: AtomicU64,
    /// Nanoseconds of completed sleeps since the limit was set. `sleeps_since` is the start of the current
    /// sleep, or 0.
    slept: AtomicU64,
    sleeps_since: AtomicU64,
    /// Pages that the vCPU's ring had reported when the limit was set.
    named_before: AtomicU64,
    is_asleep: AtomicBool,
}

impl Throttling {
    pub(crate) fn new(vcpus: Arc<Vcpus>, tracking: Arc<Tracking>) -> Self {
        Self {
            begin: Instant::now(),
            percent: AtomicU8::new(0),
            throttles: (0..vcpus.count()).map(|_| VcpuThrottle::default()).collect(),
            vcpus,
            tracking,
            generation: AtomicU64::new(0),
            rates: Rates::default(),
            quit: Mutex::new(false),
            changed: Condvar::new(),
        }
    }

    /// Ends the throttle's thread.
    pub(crate) fn quit(&self) {
        *self.quit.lock() = true;
        self.changed.notify_all();
    }

    /// Sleeps on a vCPU thread outside the guest, if the vCPU's clock requires it.
    pub(crate) fn rest(&self, vcpu: usize) {
        let generation = self.generation.load(Ordering::Acquire);
        let limits = self.limits(vcpu);
        if limits.is_none() {
            return;
        }
        let time = self.brake(vcpu).sleep_due(self.now(), self.reported(vcpu), limits);
        if time.is_zero() {
            return;
        }
        let VcpuThrottle { is_asleep, slept, sleeps_since, .. } = &self.throttles[vcpu];
        is_asleep.store(true, Ordering::Relaxed);
        let began = self.now().as_nanos() as u64;
        let is_limited = limits.dirty_bytes_per_second.is_some();
        sleeps_since.store(if is_limited { began } else { 0 }, Ordering::Relaxed);
        self.vcpus.gate.sleep(time, || self.generation.load(Ordering::Acquire) == generation);
        if sleeps_since.swap(0, Ordering::Relaxed) > 0 {
            slept.fetch_add(self.now().as_nanos() as u64 - began, Ordering::Relaxed);
        }
        is_asleep.store(false, Ordering::Relaxed);
        self.brake(vcpu).woke(self.now());
    }

    pub(crate) fn set_cpu_throttle(&self, percent: u8) {
        self.percent.store(percent.min(ThrottleClock::PERCENT_MAX), Ordering::Relaxed);
        self.limits_changed();
    }

    pub(crate) fn set_dirty_limit(&self, vcpu: Option<usize>, bytes: Option<u64>) -> Result<(), VmError> {
        let refuse = |why: String| Err(VmError::new("set a vCPU's dirty limit", why));
        if self.tracking.ring().is_none() {
            return refuse(
                "only dirty rings count the dirty pages of each vCPU: start the VM with --dirty-ring-size"
                    .into(),
            );
        }
        let count = self.throttles.len();
        let vcpus = match vcpu {
            None => 0..count,
            Some(vcpu) if vcpu < count => vcpu..vcpu + 1,
            Some(vcpu) => return refuse(format!("there is no vCPU {vcpu}: the machine has {count}")),
        };
        if bytes == Some(0) {
            return refuse("a limit of 0 would stop the guest: give bytes per second".into());
        }
        for vcpu in vcpus {
            // Pages dirtied before the limit was set do not count towards it.
            self.brake(vcpu).settle(self.now(), self.reported(vcpu));
            let throttle = &self.throttles[vcpu];
            throttle.dirty_limit.store(bytes.unwrap_or(0), Ordering::Relaxed);
            throttle.slept.store(0, Ordering::Relaxed);
            throttle.named_before.store(self.reported(vcpu), Ordering::Relaxed);
        }
        self.limits_changed();
        Ok(())
    }

    pub(crate) fn vcpu_dirty_rates(&self) -> Vec<VcpuDirtyRate> {
        let Some(ring) = self.tracking.ring() else { return Vec::new() };
        let rates = self.rates.get(ring);
        let vcpus = 0..self.throttles.len();
        vcpus
            .map(|vcpu| VcpuDirtyRate {
                rate_bytes: rates.get(vcpu).copied().unwrap_or(0),
                limit_bytes: self.limits(vcpu).dirty_bytes_per_second,
            })
            .collect()
    }

    pub(crate) fn dirty_limit_times(&self) -> Option<DirtyLimitTimes> {
        let ring = self.tracking.ring()?;
        let entries = f64::from(ring.entries());
        let vcpus: Vec<VcpuDirtyRate> = self.vcpu_dirty_rates();
        if vcpus.iter().all(|vcpu| vcpu.limit_bytes.is_none()) {
            return None;
        }
        let now = self.now().as_nanos() as u64;
        let per_round = |(vcpu, throttle): (usize, &VcpuThrottle)| {
            let named = self.reported(vcpu).saturating_sub(throttle.named_before.load(Ordering::Relaxed));
            // Before the first ring is full, the time to fill one is unknown.
            let rings = (named as f64 / entries).max(1.0);
            let sleeps = match throttle.sleeps_since.load(Ordering::Relaxed) {
                0 => 0,
                since => now.saturating_sub(since),
            };
            let slept = throttle.slept.load(Ordering::Relaxed) + sleeps;
            Duration::from_nanos((slept as f64 / rings) as u64)
        };
        let rate = vcpus.iter().map(|vcpu| vcpu.rate_bytes as f64).sum::<f64>() / vcpus.len() as f64;
        let full = if rate > 0.0 { entries * PAGE_SIZE as f64 / rate } else { 0.0 };
        Some(DirtyLimitTimes {
            throttled_per_round: self.throttles.iter().enumerate().map(per_round).max()?,
            ring_full: Duration::try_from_secs_f64(full).unwrap_or(Duration::MAX),
        })
    }

    /// Waits until a vCPU may have to sleep. False: the thread must end.
    fn wait(&self) -> bool {
        let mut quit = self.quit.lock();
        let time = match self.tracking.ring() {
            _ if *quit => return false,
            _ if self.is_active() => TICK,
            Some(ring) if ring.is_running() => TICK,
            Some(_) => IDLE_TICK,
            None => {
                self.changed.wait(&mut quit);
                return !*quit;
            }
        };
        self.changed.wait_for(&mut quit, time);
        !*quit
    }

    fn call_out_the_due(&self) {
        let now = self.now();
        let is_due = |vcpu: usize| {
            !self.throttles[vcpu].is_asleep.load(Ordering::Relaxed)
                && self.brake(vcpu).is_due(now, self.reported(vcpu), self.limits(vcpu))
        };
        self.vcpus.kick_if_running(is_due);
    }

    /// Makes every sleeping vCPU apply the limits that were just changed.
    fn limits_changed(&self) {
        self.generation.fetch_add(1, Ordering::Release);
        {
            let _lock = self.quit.lock();
            self.changed.notify_all();
        }
        self.vcpus.gate.wake_sleepers();
    }

    fn now(&self) -> Duration {
        self.begin.elapsed()
    }

    fn limits(&self, vcpu: usize) -> ThrottleLimits {
        let bytes = self.throttles[vcpu].dirty_limit.load(Ordering::Relaxed);
        ThrottleLimits {
            percent: self.percent.load(Ordering::Relaxed),
            dirty_bytes_per_second: (bytes > 0).then_some(bytes),
        }
    }

    fn is_active(&self) -> bool {
        (0..self.throttles.len()).any(|vcpu| !self.limits(vcpu).is_none())
    }

    fn brake(&self, vcpu: usize) -> MutexGuard<'_, ThrottleClock> {
        self.throttles[vcpu].brake.lock()
    }

    /// Pages that the vCPU's ring has reported so far; 0 without a ring.
    fn reported(&self, vcpu: usize) -> u64 {
        self.tracking.ring().map_or(0, |ring| ring.reported_by(vcpu))
    }
}

/// Starts the throttle's thread. [`Throttling::quit`] ends it.
pub(crate) fn spawn(throttling: &Arc<Throttling>) -> std::io::Result<JoinHandle<()>> {
    let throttling = Arc::clone(throttling);
    std::thread::Builder::new().name("throttle".into()).spawn(move || {
        let mut watch = Watch::default();
        while throttling.wait() {
            if let Some(ring) = throttling.tracking.ring() {
                watch.looked(ring, &ring.poll());
                throttling.rates.measure(ring);
            }
            if throttling.is_active() {
                throttling.call_out_the_due();
            }
        }
    })
}
