//! The threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna::{ThrottleClock, VcpuDirtyRate, VmError};
use sterna_ram::{PAGE_SIZE, RamError};

use super::clock::now_ns;
use super::live::{Live, Progress};
use super::state::{GuestState, WorkerState};
use super::{Inner, StopPoint};
use crate::model::pattern::hash;
use crate::model::words::{overlay, word};
use crate::model::{PageId, Share, WORDS_PER_PAGE, WordPlan, share};

/// Steps between two looks at clock and wishes at full speed.
const BATCH_STEPS: u64 = 16;
/// The longest sleep, so the longest time between beats.
const NAP: Duration = Duration::from_millis(1);
/// A worker that was late makes up for this much time at most.
const CATCH_UP_NS: u64 = 20_000_000;

/// The time over which a worker's dirty rate is measured.
const RATE_PERIOD_NS: u64 = 1_000_000_000;

/// A guest that runs: its threads, and the state that they do not have.
pub(super) struct Run {
    threads: Vec<JoinHandle<Result<WorkerState, RamError>>>,
    seen: Vec<Arc<Seen>>,
    stop: Arc<AtomicBool>,
    rest: GuestState,
}

/// What a running worker shows.
struct Seen {
    steps: AtomicU64,
    beats: AtomicU64,
    max_gap_ns: AtomicU64,
    idle: AtomicBool,
    /// Bytes per second over the last period; 0 before one is over.
    dirty_rate: AtomicU64,
}

impl Run {
    /// Starts a thread for each worker. On error no worker has taken a step, and the state comes back.
    pub fn spawn(inner: Arc<Inner>, state: GuestState) -> Result<Self, (GuestState, VmError)> {
        let shares = share::divide(&inner.ram, state.workers.len());
        let rest = GuestState { workers: Vec::new(), ..state };
        let mut run = Self { threads: Vec::new(), seen: Vec::new(), stop: Arc::default(), rest };
        // Nobody begins before all are there: a guest of which a part has run cannot be given back.
        let mut gates = Vec::new();
        for (index, (worker, share)) in state.workers.iter().cloned().zip(shares).enumerate() {
            let (open, gate) = channel();
            let seen = Arc::new(Seen::of(&worker));
            let worker = Worker {
                inner: Arc::clone(&inner),
                index,
                share,
                plan: run.rest.plan,
                generation: inner.live.generation(),
                stop: Arc::clone(&run.stop),
                seen: Arc::clone(&seen),
                throttle: ThrottleClock::default(),
                rate_since: (now_ns(), worker.steps),
                state: worker,
            };
            match std::thread::Builder::new().name(format!("guest-{index}")).spawn(move || worker.run(&gate))
            {
                Ok(thread) => run.threads.push(thread),
                Err(error) => {
                    drop(gates);
                    let why = VmError::new(format!("start the thread of worker {index}"), error);
                    run.threads.drain(..).for_each(|thread| drop(thread.join()));
                    return Err((GuestState { workers: state.workers, ..run.rest }, why));
                }
            }
            run.seen.push(seen);
            gates.push(open);
        }
        for open in gates {
            // A thread that is gone already is found when it is joined.
            let _ = open.send(());
        }
        Ok(run)
    }

    /// Stops every worker and takes its state.
    pub fn stop(mut self) -> Result<GuestState, VmError> {
        self.stop.store(true, Ordering::Release);
        self.threads.iter().for_each(|thread| thread.thread().unpark());
        let mut failure = None;
        for (index, thread) in self.threads.drain(..).enumerate() {
            match thread.join() {
                Ok(Ok(state)) => self.rest.workers.push(state),
                Ok(Err(error)) => failure = Some(VmError::new(format!("worker {index}"), error)),
                Err(_) => failure = Some(VmError::new(format!("worker {index}"), "its thread panicked")),
            }
        }
        failure.map_or(Ok(self.rest), Err)
    }

    pub fn progress(&self) -> Progress {
        let all = |field: fn(&Seen) -> &AtomicU64| -> Vec<u64> {
            self.seen.iter().map(|seen| field(seen).load(Ordering::Relaxed)).collect()
        };
        let max_gap_ns = all(|seen| &seen.max_gap_ns).into_iter().max().unwrap_or(0);
        Progress {
            steps: all(|seen| &seen.steps),
            beats: all(|seen| &seen.beats),
            idle: self.seen.iter().map(|seen| seen.idle.load(Ordering::Relaxed)).collect(),
            max_gap: Duration::from_nanos(max_gap_ns),
        }
    }

    /// Each worker's dirty rate (every step counts as a page; 0 before a period is over) and its limit.
    pub fn dirty_rates(&self, live: &Live) -> Vec<VcpuDirtyRate> {
        let rate = |(worker, seen): (usize, &Arc<Seen>)| VcpuDirtyRate {
            rate_bytes: seen.dirty_rate.load(Ordering::Relaxed),
            limit_bytes: live.throttle_limits(worker).dirty_bytes_per_second,
        };
        self.seen.iter().enumerate().map(rate).collect()
    }

    pub fn workers(&self) -> usize {
        self.seen.len()
    }

    /// Has every worker that sleeps look at the limits anew.
    pub fn wake_sleepers(&self) {
        self.threads.iter().for_each(|thread| thread.thread().unpark());
    }

    pub fn reset_max_gap(&self) {
        self.seen.iter().for_each(|seen| seen.max_gap_ns.store(0, Ordering::Relaxed));
    }
}

impl Seen {
    fn of(state: &WorkerState) -> Self {
        Self {
            steps: state.steps.into(),
            beats: state.beats.into(),
            max_gap_ns: state.max_gap_ns.into(),
            idle: state.is_idle().into(),
            dirty_rate: AtomicU64::new(0),
        }
    }
}

/// One thread's view of the guest.
struct Worker {
    inner: Arc<Inner>,
    index: usize,
    share: Share,
    plan: WordPlan,
    /// The last request that was adopted.
    generation: u64,
    stop: Arc<AtomicBool>,
    seen: Arc<Seen>,
    throttle: ThrottleClock,
    /// When the period of the dirty rate began, ns, and the steps at that time.
    rate_since: (u64, u64),
    state: WorkerState,
}

impl Worker {
    fn run(mut self, gate: &Receiver<()>) -> Result<WorkerState, RamError> {
        if gate.recv().is_err() {
            return Ok(self.state);
        }
        if self.state.partial_words > 0 {
            self.finish_step(self.state.partial_words)?;
        }
        let mut pace = Pace::new(self.inner.live.rate());
        self.throttle.settle(Duration::from_nanos(now_ns()), self.state.steps);
        self.throttle.woke(Duration::from_nanos(now_ns()));
        while !self.stop.load(Ordering::Acquire) {
            let now = self.beat();
            self.measure_rate(now);
            if self.rest(now) {
                continue;
            }
            self.adopt();
            let steps =
                if self.state.is_idle() { 0 } else { pace.due(self.inner.live.rate(), now).min(BATCH_STEPS) };
            if steps == 0 {
                std::thread::park_timeout(NAP.min(pace.until_next(now)));
            }
            for _ in 0..steps {
                self.finish_step(0)?;
            }
            self.seen.steps.store(self.state.steps, Ordering::Relaxed);
        }
        if self.inner.live.stop_point() == StopPoint::MidPage {
            self.begin_step()?;
        }
        Ok(self.state)
    }

    /// Notes the time since the last beat.
    fn beat(&mut self) -> u64 {
        let now = now_ns();
        if self.state.last_beat_ns != 0 {
            let gap = now.saturating_sub(self.state.last_beat_ns);
            self.state.max_gap_ns = self.seen.max_gap_ns.fetch_max(gap, Ordering::Relaxed).max(gap);
        }
        self.state.last_beat_ns = now;
        self.state.beats += 1;
        self.seen.beats.store(self.state.beats, Ordering::Relaxed);
        now
    }

    /// Sleeps if the throttle says so, but not longer than the guest is to run and the limits are as they are.
    fn rest(&mut self, now: u64) -> bool {
        let generation = self.inner.live.throttle_generation();
        let limits = self.inner.live.throttle_limits(self.index);
        let time = self.throttle.sleep_due(Duration::from_nanos(now), self.state.steps, limits);
        if time.is_zero() {
            return false;
        }
        let deadline = Instant::now() + time;
        while !self.stop.load(Ordering::Acquire) && self.inner.live.throttle_generation() == generation {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            std::thread::park_timeout(left);
        }
        self.throttle.woke(Duration::from_nanos(now_ns()));
        true
    }

    fn measure_rate(&mut self, now: u64) {
        let (since, steps) = self.rate_since;
        let time = now.saturating_sub(since);
        if time >= RATE_PERIOD_NS {
            let bytes = u128::from(self.state.steps - steps) * PAGE_SIZE as u128;
            let rate = (bytes * 1_000_000_000 / u128::from(time)) as u64;
            self.seen.dirty_rate.store(rate, Ordering::Relaxed);
            self.rate_since = (now, self.state.steps);
        }
    }

    /// Takes over a pattern that was wished for, from the next step on.
    fn adopt(&mut self) {
        let generation = self.inner.live.generation();
        if generation != self.generation {
            self.generation = generation;
            let (pattern, working_set_pages) = self.inner.live.load();
            self.state.change(pattern, working_set_pages, self.share.pages());
            self.seen.idle.store(self.state.is_idle(), Ordering::Relaxed);
        }
    }

    /// Writes the words of the next step from the `from`th on, and counts it.
    #[inline]
    fn finish_step(&mut self, from: usize) -> Result<(), RamError> {
        self.write_words(from, self.plan.count())?;
        self.state.partial_words = 0;
        self.state.steps += 1;
        Ok(())
    }

    /// Writes some first words of the next step and remembers how many: at least one, never all.
    fn begin_step(&mut self) -> Result<(), RamError> {
        let next = self.state.steps + 1;
        if self.state.history.page(self.state.seed, next).is_some() {
            let count = 1 + hash(!self.state.seed, next) as usize % (self.plan.count() - 1);
            self.write_words(0, count)?;
            self.state.partial_words = count;
        }
        Ok(())
    }

    #[inline]
    fn write_words(&self, from: usize, to: usize) -> Result<(), RamError> {
        let step = self.state.steps + 1;
        // The newest epoch holds for the next step: changes are noted before it or, within it, after it.
        let page = if from == 0 {
            let epoch = self.state.history.current();
            epoch.pattern.page(self.state.seed, step, epoch.working_set_pages)
        } else {
            self.state.history.page(self.state.seed, step)
        };
        let Some(page) = page else { return Ok(()) };
        let Some((block_index, block_page)) = self.share.locate(page) else { return Ok(()) };
        let id = PageId::new(self.index, page);
        let block = &self.inner.ram.blocks()[block_index];
        let offset = block_page * PAGE_SIZE as u64;
        if self.plan == WordPlan::FULL {
            let mut words = [0; WORDS_PER_PAGE];
            overlay(&mut words, step, id, self.plan, to);
            let mut bytes = [0; PAGE_SIZE];
            for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(&words) {
                *bytes = word.to_le_bytes();
            }
            block.write(offset + from as u64 * 8, &bytes[from * 8..to * 8])?;
        } else {
            for nth in from..to {
                let slot = self.plan.slot(nth);
                block.write_u64(offset + slot as u64 * 8, word(step, id, slot))?;
            }
        }
        self.inner.tracker.written(block_index, block_page);
        Ok(())
    }
}

/// Says how many steps are due.
struct Pace {
    rate: u64,
    /// The time at which no step was due.
    origin_ns: u64,
    done: u64,
}

impl Pace {
    fn new(rate: u64) -> Self {
        Self { rate, origin_ns: now_ns(), done: 0 }
    }

    /// Steps that are due at `now_ns`; they count as taken.
    fn due(&mut self, rate: u64, now_ns: u64) -> u64 {
        if rate == 0 {
            return BATCH_STEPS;
        }
        if rate != self.rate {
            *self = Self { rate, origin_ns: now_ns, done: 0 };
        }
        let by_now = |origin: u64| {
            (u128::from(now_ns.saturating_sub(origin)) * u128::from(rate) / 1_000_000_000) as u64
        };
        let most = (u128::from(CATCH_UP_NS) * u128::from(rate) / 1_000_000_000) as u64;
        let due = by_now(self.origin_ns).saturating_sub(self.done);
        if due > most.max(1) {
            *self = Self { rate, origin_ns: now_ns.saturating_sub(CATCH_UP_NS), done: 0 };
            return self.take(by_now(self.origin_ns).max(1));
        }
        self.take(due)
    }

    fn take(&mut self, due: u64) -> u64 {
        let taken = due.min(BATCH_STEPS);
        self.done += taken;
        taken
    }

    fn until_next(&self, now_ns: u64) -> Duration {
        if self.rate == 0 {
            return NAP;
        }
        let next =
            self.origin_ns + (u128::from(self.done + 1) * 1_000_000_000 / u128::from(self.rate)) as u64;
        Duration::from_nanos(next.saturating_sub(now_ns).max(1000))
    }
}
