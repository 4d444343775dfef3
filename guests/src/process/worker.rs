//! The threads of a running process guest.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna::{ThrottleClock, VcpuDirtyRate, VmError};
use sterna_ram::{PAGE_SIZE, RamBlock, RamError};

use super::clock::now_ns;
use super::live::{Live, Progress};
use super::state::{GuestState, WorkerState, words_in_flight};
use super::{Inner, StopPoint};
use crate::model::pattern::hash;
use crate::model::words::{overlay, word};
use crate::model::{Act, Acts, PageId, Share, WORDS_PER_PAGE, WordPlan, share};

const PAGE_BYTES: u64 = PAGE_SIZE as u64;
/// Number of steps between two reads of clock and settings at full speed.
const BATCH_STEPS: u64 = 16;
/// The longest sleep, and therefore the longest time between beats.
const NAP: Duration = Duration::from_millis(1);
/// Largest delay for which a late worker catches up, in ns.
const CATCH_UP_NS: u64 = 20_000_000;

/// The period over which a worker's dirty rate is measured, in ns.
const RATE_PERIOD_NS: u64 = 1_000_000_000;

/// A running guest: its threads, and the state that they do not own.
pub(super) struct Run {
    threads: Vec<JoinHandle<Result<WorkerState, RamError>>>,
    seen: Vec<Arc<Seen>>,
    stop: Arc<AtomicBool>,
    rest: GuestState,
}

/// The published progress of a running worker.
struct Seen {
    steps: AtomicU64,
    beats: AtomicU64,
    max_gap_ns: AtomicU64,
    idle: AtomicBool,
    /// Bytes per second over the last period; 0 before the first period has ended.
    dirty_rate: AtomicU64,
}

impl Run {
    /// Starts a thread for each worker. On error no worker has taken a step, and the state is returned.
    pub fn spawn(inner: Arc<Inner>, state: GuestState) -> Result<Self, (GuestState, VmError)> {
        let shares = share::divide(&inner.ram, state.workers.len());
        let rest = GuestState { workers: Vec::new(), ..state };
        let mut run = Self { threads: Vec::new(), seen: Vec::new(), stop: Arc::default(), rest };
        // No thread begins before all exist, because a guest that has partly run could not be returned.
        let mut gates = Vec::new();
        for (index, (worker, share)) in state.workers.iter().cloned().zip(shares).enumerate() {
            let (open, gate) = channel();
            let seen = Arc::new(Seen::of(&worker));
            let worker = Worker {
                inner: Arc::clone(&inner),
                index,
                share,
                plan: run.rest.plan,
                acts: run.rest.acts,
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
            // A thread that has already ended is found by the join.
            let _ = open.send(());
        }
        Ok(run)
    }

    /// Stops every worker and returns the state.
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

    /// Each worker's dirty rate and limit. Every step counts as a page; the rate is 0 before a period has
    /// ended.
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

    /// Makes every sleeping worker read the limits again.
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

/// The data of one thread.
struct Worker {
    inner: Arc<Inner>,
    index: usize,
    share: Share,
    plan: WordPlan,
    acts: Acts,
    /// Number of the last request that the worker has adopted.
    generation: u64,
    stop: Arc<AtomicBool>,
    seen: Arc<Seen>,
    throttle: ThrottleClock,
    /// Start of the present rate period (ns), and the steps at that time.
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

    /// Records the time since the last beat.
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

    /// Sleeps for the time that the throttle computes.
    ///
    /// Wakes earlier if the guest must stop or the limits change.
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

    /// Adopts a requested pattern from the next step on.
    fn adopt(&mut self) {
        let generation = self.inner.live.generation();
        if generation != self.generation {
            self.generation = generation;
            let (pattern, working_set_pages) = self.inner.live.load();
            self.state.change(pattern, working_set_pages, self.share.pages());
            self.seen.idle.store(self.state.is_idle(), Ordering::Relaxed);
        }
    }

    /// Executes the next step from its `from`th word on, and counts it.
    #[inline]
    fn finish_step(&mut self, from: usize) -> Result<(), RamError> {
        let act = self.next_act();
        self.step(act, from, words_in_flight(act, self.plan))?;
        self.state.partial_words = 0;
        self.state.steps += 1;
        Ok(())
    }

    /// Writes some first words of the next step and records their number.
    ///
    /// At least one word, never all.
    fn begin_step(&mut self) -> Result<(), RamError> {
        let (next, act) = (self.state.steps + 1, self.next_act());
        let words = words_in_flight(act, self.plan);
        if words > 1 && self.state.history.page(self.state.seed, next).is_some() {
            let count = 1 + hash(!self.state.seed, next) as usize % (words - 1);
            self.step(act, 0, count)?;
            self.state.partial_words = count;
        }
        Ok(())
    }

    #[inline]
    fn next_act(&self) -> Act {
        self.acts.act(self.state.seed, self.state.steps + 1)
    }

    #[inline]
    fn step(&self, act: Act, from: usize, to: usize) -> Result<(), RamError> {
        let step = self.state.steps + 1;
        // The newest epoch applies to the next step. A change is recorded before the step, or within it for
        // the step after it.
        let epoch = self.state.history.current();
        let page = if from == 0 {
            epoch.pattern.page(self.state.seed, step, epoch.working_set_pages)
        } else {
            self.state.history.page(self.state.seed, step)
        };
        let Some(page) = page else { return Ok(()) };
        match act {
            Act::Write => self.write_words(step, page, from..to),
            Act::Zero => self.write_zeros(page, from..to),
            Act::Discard | Act::Balloon => (page..page + act.pages(page, epoch.working_set_pages))
                .try_for_each(|page| self.give_back(page)),
        }
    }

    fn write_words(&self, step: u64, page: u64, words: Range<usize>) -> Result<(), RamError> {
        let Some((block_index, block_page)) = self.share.locate(page) else { return Ok(()) };
        let id = PageId::new(self.index, page);
        let block = &self.inner.ram.blocks()[block_index];
        let offset = block_page * PAGE_BYTES;
        if self.plan == WordPlan::FULL {
            let mut content = [0; WORDS_PER_PAGE];
            overlay(&mut content, step, id, self.plan, words.end);
            let mut bytes = [0; PAGE_SIZE];
            for (bytes, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(&content) {
                *bytes = word.to_le_bytes();
            }
            block.write(offset + words.start as u64 * 8, &bytes[words.start * 8..words.end * 8])?;
        } else {
            for nth in words {
                let slot = self.plan.slot(nth);
                block.write_u64(offset + slot as u64 * 8, word(step, id, slot))?;
            }
        }
        self.inner.tracker.written(block_index, block_page);
        Ok(())
    }

    fn write_zeros(&self, page: u64, words: Range<usize>) -> Result<(), RamError> {
        let Some((block_index, block_page)) = self.share.locate(page) else { return Ok(()) };
        let offset = block_page * PAGE_BYTES + words.start as u64 * 8;
        self.inner.ram.blocks()[block_index].write(offset, &[0; PAGE_SIZE][..words.len() * 8])?;
        self.inner.tracker.written(block_index, block_page);
        Ok(())
    }

    /// Gives a page back to the host, as a VMM does when its guest's balloon grows.
    fn give_back(&self, page: u64) -> Result<(), RamError> {
        let Some((block_index, block_page)) = self.share.locate(page) else { return Ok(()) };
        let block = &self.inner.ram.blocks()[block_index];
        // In postcopy the page must arrive before it is given back. A later arrival would overwrite the
        // zeros.
        block.write_u64(block_page * PAGE_BYTES, 0)?;
        give_back(block, block_page)?;
        self.inner.tracker.given_back(block_index, block_page, 1);
        Ok(())
    }
}

/// Gives a page back. Stores zeros if that is impossible (huge pages, pinned memory, memory without
/// permission).
fn give_back(block: &RamBlock, page: u64) -> Result<(), RamError> {
    let can = block.page_bytes() == PAGE_BYTES && block.permissions().discard;
    if can && block.discard_pages(page, 1).is_ok() {
        return Ok(());
    }
    block.zero_present_pages(page, 1)
}

/// Computes how many steps are due.
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

    /// The number of steps that are due at `now_ns`; they count as taken.
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
