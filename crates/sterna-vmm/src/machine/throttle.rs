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

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use sterna::{DirtyLimitTimes, ThrottleClock, ThrottleLimits, VcpuDirtyRate, VmError};
use sterna_ram::PAGE_SIZE;
use sterna_ram::dirty::KvmDirtyRing;

use super::Shared;
use watch::Watch;

mod watch;

/// From one look at the brakes to the next.
const TICK: Duration = ThrottleClock::SLICE;
/// From one look to the next whether a migration has begun to use the rings.
const IDLE_TICK: Duration = Duration::from_millis(100);
/// The time over which dirty rates are measured: QEMU's `vcpu-dirty-limit-period`.
const RATE_PERIOD: Duration = Duration::from_secs(1);

/// What the throttle knows of all vCPUs.
#[derive(Debug)]
pub(crate) struct Throttling {
    begin: Instant,
    percent: AtomicU8,
    vcpus: Vec<VcpuThrottle>,
    /// Counts changes of the limits; who sleeps by old ones asks again.
    generation: AtomicU64,
    rates: Mutex<Rates>,
    quit: Mutex<bool>,
    /// `quit`, or a limit where there was none.
    changed: Condvar,
}

#[derive(Debug, Default)]
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

/// Dirty rates of the last period.
#[derive(Debug, Default)]
struct Rates {
    /// When, and what each vCPU had reported then; none while tracking does not run.
    since: Option<(Instant, Vec<u64>)>,
    /// Bytes per second; empty until a period is over.
    bytes: Vec<u64>,
}

/// Bytes per second of vCPUs that had reported so many pages `before`, and so many `now`.
fn rates(before: &[u64], now: &[u64], time: Duration) -> Vec<u64> {
    let rate = |(now, before): (&u64, &u64)| {
        let bytes = u128::from(now.saturating_sub(*before)) * PAGE_SIZE as u128;
        u64::try_from(bytes * 1_000_000_000 / time.as_nanos().max(1)).unwrap_or(u64::MAX)
    };
    now.iter().zip(before).map(rate).collect()
}

impl Throttling {
    pub(crate) fn new(vcpus: usize) -> Self {
        Self {
            begin: Instant::now(),
            percent: AtomicU8::new(0),
            vcpus: (0..vcpus).map(|_| VcpuThrottle::default()).collect(),
            generation: AtomicU64::new(0),
            rates: Mutex::default(),
            quit: Mutex::new(false),
            changed: Condvar::new(),
        }
    }

    /// Ends the throttle's thread.
    pub(crate) fn quit(&self) {
        *self.quit.lock() = true;
        self.changed.notify_all();
    }

    fn now(&self) -> Duration {
        self.begin.elapsed()
    }

    fn limits(&self, vcpu: usize) -> ThrottleLimits {
        let bytes = self.vcpus[vcpu].dirty_limit.load(Ordering::Relaxed);
        ThrottleLimits {
            percent: self.percent.load(Ordering::Relaxed),
            dirty_bytes_per_second: (bytes > 0).then_some(bytes),
        }
    }

    fn is_active(&self) -> bool {
        (0..self.vcpus.len()).any(|vcpu| !self.limits(vcpu).is_none())
    }

    fn brake(&self, vcpu: usize) -> MutexGuard<'_, ThrottleClock> {
        self.vcpus[vcpu].brake.lock()
    }

    /// Waits until something may be due. False: the thread is to end.
    fn wait(&self, ring: Option<&KvmDirtyRing>) -> bool {
        let mut quit = self.quit.lock();
        let time = match ring {
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

    /// Has everyone look at the limits that were just changed.
    fn announce(&self) {
        self.generation.fetch_add(1, Ordering::Release);
        let _lock = self.quit.lock();
        self.changed.notify_all();
    }

    fn measure_rates(&self, ring: &KvmDirtyRing) {
        let mut last = self.last_rates();
        let Some((begun, reported_then)) = ring.begun() else {
            *last = Rates::default();
            return;
        };
        // Tracking that ended and began again between two looks is another.
        if last.since.as_ref().is_none_or(|(since, _)| *since < begun) {
            *last = Rates { since: Some((begun, reported_then)), bytes: Vec::new() };
        }
        let (now, reported) = (Instant::now(), ring.reported());
        let Some((since, before)) = &last.since else { return };
        let time = now.saturating_duration_since(*since);
        if time >= RATE_PERIOD {
            let bytes = rates(before, &reported, time);
            *last = Rates { since: Some((now, reported)), bytes };
        }
    }

    /// Each vCPU's rate, bytes per second: over the last period, or since tracking began if none is over. Empty where
    /// it does not run, or has hardly begun.
    fn rates(&self, ring: &KvmDirtyRing) -> Vec<u64> {
        self.measure_rates(ring);
        let last = self.last_rates();
        match &last.since {
            Some((since, before)) if last.bytes.is_empty() && since.elapsed() >= TICK => {
                rates(before, &ring.reported(), since.elapsed())
            }
            _ => last.bytes.clone(),
        }
    }

    fn last_rates(&self) -> MutexGuard<'_, Rates> {
        self.rates.lock()
    }
}

/// Starts the throttle's thread, which ends with [`Throttling::quit`].
pub(crate) fn spawn(shared: &Arc<Shared>) -> std::io::Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new().name("throttle".into()).spawn(move || {
        let ring = shared.tracking.ring();
        let mut watch = Watch::default();
        while shared.throttling.wait(ring) {
            if let Some(ring) = ring {
                watch.looked(ring, &ring.poll());
                shared.throttling.measure_rates(ring);
            }
            if shared.throttling.is_active() {
                shared.call_out_the_due();
            }
        }
    })
}

impl Shared {
    /// A vCPU thread that is out of the guest sleeps, if its brake says so.
    pub(crate) fn rest(&self, vcpu: usize) {
        let throttling = &self.throttling;
        let generation = throttling.generation.load(Ordering::Acquire);
        let limits = throttling.limits(vcpu);
        if limits.is_none() {
            return;
        }
        let time = throttling.brake(vcpu).sleep_due(throttling.now(), self.reported(vcpu), limits);
        if time.is_zero() {
            return;
        }
        let VcpuThrottle { is_asleep, slept, sleeps_since, .. } = &throttling.vcpus[vcpu];
        is_asleep.store(true, Ordering::Relaxed);
        let began = throttling.now().as_nanos() as u64;
        let is_limited = limits.dirty_bytes_per_second.is_some();
        sleeps_since.store(if is_limited { began } else { 0 }, Ordering::Relaxed);
        self.gate.sleep(time, || throttling.generation.load(Ordering::Acquire) == generation);
        if sleeps_since.swap(0, Ordering::Relaxed) > 0 {
            slept.fetch_add(throttling.now().as_nanos() as u64 - began, Ordering::Relaxed);
        }
        is_asleep.store(false, Ordering::Relaxed);
        throttling.brake(vcpu).woke(throttling.now());
    }

    fn call_out_the_due(&self) {
        let throttling = &self.throttling;
        let now = throttling.now();
        let is_due = |vcpu: usize| {
            !throttling.vcpus[vcpu].is_asleep.load(Ordering::Relaxed)
                && throttling.brake(vcpu).is_due(now, self.reported(vcpu), throttling.limits(vcpu))
        };
        self.gate.if_running(|| self.vcpus.iter().filter(|vcpu| is_due(vcpu.index)).for_each(|v| v.kick()));
    }

    /// Pages that the vCPU's ring has named so far; 0 without a ring.
    fn reported(&self, vcpu: usize) -> u64 {
        self.tracking.ring().map_or(0, |ring| ring.reported_by(vcpu))
    }

    pub(crate) fn set_cpu_throttle(&self, percent: u8) {
        self.throttling.percent.store(percent.min(ThrottleClock::PERCENT_MAX), Ordering::Relaxed);
        self.limits_changed();
    }

    pub(crate) fn set_dirty_limit(&self, vcpu: Option<usize>, bytes: Option<u64>) -> Result<(), VmError> {
        let refuse = |why: String| Err(VmError::new("set a vCPU's dirty limit", why));
        if self.tracking.ring().is_none() {
            return refuse("only dirty rings count per vCPU: start the VM with --dirty-ring-size".into());
        }
        let count = self.throttling.vcpus.len();
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
            self.throttling.brake(vcpu).settle(self.throttling.now(), self.reported(vcpu));
            let throttle = &self.throttling.vcpus[vcpu];
            throttle.dirty_limit.store(bytes.unwrap_or(0), Ordering::Relaxed);
            throttle.slept.store(0, Ordering::Relaxed);
            throttle.named_before.store(self.reported(vcpu), Ordering::Relaxed);
        }
        self.limits_changed();
        Ok(())
    }

    pub(crate) fn vcpu_dirty_rates(&self) -> Vec<VcpuDirtyRate> {
        let Some(ring) = self.tracking.ring() else { return Vec::new() };
        let rates = self.throttling.rates(ring);
        let vcpus = 0..self.throttling.vcpus.len();
        vcpus
            .map(|vcpu| VcpuDirtyRate {
                rate_bytes: rates.get(vcpu).copied().unwrap_or(0),
                limit_bytes: self.throttling.limits(vcpu).dirty_bytes_per_second,
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
        let now = self.throttling.now().as_nanos() as u64;
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
            throttled_per_round: self.throttling.vcpus.iter().enumerate().map(per_round).max()?,
            ring_full: Duration::try_from_secs_f64(full).unwrap_or(Duration::MAX),
        })
    }

    fn limits_changed(&self) {
        self.throttling.announce();
        self.gate.wake_sleepers();
    }
}
