//! Slows the guest down, and knows how fast each vCPU dirties memory.
//!
//! # The model
//! Each vCPU has a [`ThrottleClock`], which says when it must sleep and for how long; it sleeps on its own thread, at the
//! gate, so that stopping the machine ends the sleep at once. A vCPU that is in the guest does not look at its
//! brake: the throttle's thread looks every [`TICK`] while anything is limited, and calls out those whose brake
//! is due. While dirty rings are in use it looks into them as often, so that they seldom run full, and works out the
//! vCPUs' dirty rates each second. Rings are in use while a migration or a measurement tracks the guest's writes; at
//! other times nobody counts them, the rates are 0, and a dirty limit that was set waits.
//!
//! Locks: a brake's is the innermost; the gate's may be held around it, never the other way round.

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

/// From one look at the brakes to the next.
const TICK: Duration = ThrottleClock::SLICE;
/// From one look to the next whether a migration has begun to use the rings.
const IDLE_TICK: Duration = Duration::from_millis(100);

/// Slows a machine's vCPUs down.
pub(crate) struct Throttling {
    vcpus: Arc<Vcpus>,
    tracking: Arc<Tracking>,
    begin: Instant,
    percent: AtomicU8,
    /// One for each vCPU.
    throttles: Vec<VcpuThrottle>,
    /// Counts changes of the limits; who sleeps by old ones asks again.
    generation: AtomicU64,
    rates: Rates,
    quit: Mutex<bool>,
    /// `quit`, or a limit where there was none.
    changed: Condvar,
}

#[derive(Default)]
struct VcpuThrottle {
    brake: Mutex<ThrottleClock>,
    /// Bytes per second; 0: none.
    dirty_limit: AtomicU64,
    /// Since the limit was set, nanoseconds: in sleeps that are over; when the one that is not began, 0: none.
    slept: AtomicU64,
    sleeps_since: AtomicU64,
    /// Pages that its ring had named when the limit was set.
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

    /// A vCPU thread that is out of the guest sleeps, if its brake says so.
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
            return refuse("only dirty rings count per vCPU: start the VM with --dirty-ring-size".into());
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
            // What was dirtied before is not held against it.
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
            // Before the first ring is full nobody knows how long one takes.
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

    /// Waits until something may be due. False: the thread is to end.
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

    /// Has everyone look at the limits that were just changed.
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

    /// Pages that the vCPU's ring has named so far; 0 without a ring.
    fn reported(&self, vcpu: usize) -> u64 {
        self.tracking.ring().map_or(0, |ring| ring.reported_by(vcpu))
    }
}

/// Starts the throttle's thread, which ends with [`Throttling::quit`].
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
