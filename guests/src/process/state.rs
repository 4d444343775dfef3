//! The guest's state outside RAM, and its bytes in the stream.
//!
//! Section `process-guest`, version 1, all numbers little endian: magic, words per page (u16), fill (u8
//! kind, u64 seed), id of the boot whose clock is meant (16 bytes), number of workers (u16), then each
//! worker: seed, steps, words written of the next step (u16), beats, longest gap and last beat (ns),
//! number of epochs (u16) and each epoch: first step, pattern, pages of the working set.
//!
//! Section `process-guest-compatibility`, version 1: magic, level (u32), pages of RAM (u64).

use std::time::Duration;

use sterna::VmError;
use sterna_ram::GuestRam;

use super::config::MOST_WORKERS;
use super::live::Progress;
use super::{ProcessConfig, ProcessError, clock};
use crate::model::{Epoch, Fill, History, Pattern, Share, WordPlan, share};

const MAGIC: u32 = 0x5047_5354;

/// All of a guest that is not RAM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GuestState {
    pub plan: WordPlan,
    pub fill: Fill,
    pub workers: Vec<WorkerState>,
}

/// A worker that stands still.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WorkerState {
    pub seed: u64,
    pub steps: u64,
    /// Words that are written of the step after `steps`.
    pub partial_words: usize,
    pub history: History,
    pub beats: u64,
    pub max_gap_ns: u64,
    /// 0: never, or on another machine's clock.
    pub last_beat_ns: u64,
}

impl GuestState {
    /// A guest that has taken no step.
    pub fn initial(config: &ProcessConfig, shares: &[Share]) -> Result<Self, ProcessError> {
        let refuse = |why: &str| Err(ProcessError::Config(why.into()));
        if config.workers == 0 || config.workers > MOST_WORKERS {
            return refuse("it has 1 to 256 workers");
        }
        if config.working_set_pages == Some(0) {
            return refuse("a working set has at least one page");
        }
        if shares.iter().any(|share| share.pages() == 0) {
            return refuse("there is not a page for each worker");
        }
        let worker = |(index, share): (usize, &Share)| WorkerState {
            seed: config.seed.wrapping_add(index as u64 * 0x1_0000_0001),
            steps: 0,
            partial_words: 0,
            history: History::new(config.pattern, working_set(config.working_set_pages, share.pages())),
            beats: 0,
            max_gap_ns: 0,
            last_beat_ns: 0,
        };
        let workers = shares.iter().enumerate().map(worker).collect();
        Ok(Self { plan: config.words, fill: config.fill, workers })
    }

    pub fn progress(&self) -> Progress {
        Progress {
            steps: self.workers.iter().map(|worker| worker.steps).collect(),
            beats: self.workers.iter().map(|worker| worker.beats).collect(),
            idle: self.workers.iter().map(WorkerState::is_idle).collect(),
            max_gap: Duration::from_nanos(
                self.workers.iter().map(|worker| worker.max_gap_ns).max().unwrap_or(0),
            ),
        }
    }

    pub fn reset_max_gap(&mut self) {
        self.workers.iter_mut().for_each(|worker| worker.max_gap_ns = 0);
    }

    /// From every worker's next step on.
    pub fn set_pattern(
        &mut self,
        ram: &GuestRam,
        pattern: Pattern,
        working_set_pages: Option<u64>,
    ) -> Result<(), VmError> {
        let shares = share::divide(ram, self.workers.len());
        let mut changed = self.workers.clone();
        for (worker, share) in changed.iter_mut().zip(shares) {
            if !worker.change(pattern, working_set_pages, share.pages()) {
                return Err(VmError::new("set the pattern", format!("more than {} changes", History::LIMIT)));
            }
        }
        self.workers = changed;
        Ok(())
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut put = |bytes: &[u8]| out.extend_from_slice(bytes);
        put(&MAGIC.to_le_bytes());
        put(&(self.plan.count() as u16).to_le_bytes());
        let (kind, seed) = match self.fill {
            Fill::Zero => (0u8, 0),
            Fill::Random(seed) => (1, seed),
            Fill::Half(seed) => (2, seed),
        };
        put(&[kind]);
        put(&seed.to_le_bytes());
        put(&clock::boot_id());
        put(&(self.workers.len() as u16).to_le_bytes());
        for worker in &self.workers {
            put(&worker.seed.to_le_bytes());
            put(&worker.steps.to_le_bytes());
            put(&(worker.partial_words as u16).to_le_bytes());
            put(&worker.beats.to_le_bytes());
            put(&worker.max_gap_ns.to_le_bytes());
            put(&worker.last_beat_ns.to_le_bytes());
            put(&(worker.history.epochs().len() as u16).to_le_bytes());
            for epoch in worker.history.epochs() {
                put(&epoch.first_step.to_le_bytes());
                put(&(epoch.pattern as u64).to_le_bytes());
                put(&epoch.working_set_pages.to_le_bytes());
            }
        }
        out
    }

    /// Takes what [`GuestState::encode`] wrote, for a guest in `ram`. The error says which rule is broken.
    pub fn decode(bytes: &[u8], ram: &GuestRam) -> Result<Self, String> {
        let mut from = Reader(bytes);
        from.magic()?;
        let words = usize::from(from.u16()?);
        let plan = WordPlan::new(words).ok_or(format!("{words} words in a page"))?;
        let fill = match (from.take::<1>()?, from.u64()?) {
            ([0], _) => Fill::Zero,
            ([1], seed) => Fill::Random(seed),
            ([2], seed) => Fill::Half(seed),
            ([kind], _) => return Err(format!("fill of kind {kind}")),
        };
        let same_clock = from.take::<16>()? == clock::boot_id();
        let count = usize::from(from.u16()?);
        if count == 0 || count > MOST_WORKERS {
            return Err(format!("{count} workers"));
        }
        let shares = share::divide(ram, count);
        let workers: Result<Vec<_>, String> = shares
            .iter()
            .enumerate()
            .map(|(index, share)| {
                WorkerState::decode(&mut from, plan, share.pages(), same_clock)
                    .map_err(|why| format!("worker {index}: {why}"))
            })
            .collect();
        from.end()?;
        Ok(Self { plan, fill, workers: workers? })
    }
}

impl WorkerState {
    pub fn is_idle(&self) -> bool {
        self.history.current().pattern == Pattern::Idle
    }

    /// Another pattern from the next step on that has not begun. False if the history is full.
    pub fn change(&mut self, pattern: Pattern, working_set_pages: Option<u64>, share_pages: u64) -> bool {
        let first_step = self.steps + 1 + u64::from(self.partial_words > 0);
        self.history.change(first_step, pattern, working_set(working_set_pages, share_pages))
    }

    fn decode(
        from: &mut Reader<'_>,
        plan: WordPlan,
        share_pages: u64,
        same_clock: bool,
    ) -> Result<Self, String> {
        let (seed, steps, partial_words) = (from.u64()?, from.u64()?, usize::from(from.u16()?));
        let (beats, max_gap_ns, last_beat_ns) = (from.u64()?, from.u64()?, from.u64()?);
        let count = from.u16()?;
        let epochs: Result<Vec<_>, String> = (0..count)
            .map(|_| {
                let (first_step, pattern, working_set_pages) = (from.u64()?, from.u64()?, from.u64()?);
                let pattern = Pattern::from_number(pattern).ok_or(format!("pattern {pattern}"))?;
                Ok(Epoch { first_step, pattern, working_set_pages })
            })
            .collect();
        let history = History::from_epochs(epochs?, share_pages)?;
        if steps > 1 << 60 {
            return Err(format!("{steps} steps"));
        }
        let begun = steps + u64::from(partial_words > 0);
        if history.current().first_step > begun + 1 {
            return Err(format!(
                "an epoch from step {} on after {steps} steps",
                history.current().first_step
            ));
        }
        if partial_words >= plan.count() || (partial_words > 0 && history.page(seed, steps + 1).is_none()) {
            return Err(format!("{partial_words} words of a step that has at most {}", plan.count()));
        }
        let last_beat_ns = if same_clock { last_beat_ns } else { 0 };
        Ok(Self { seed, steps, partial_words, history, beats, max_gap_ns, last_beat_ns })
    }
}

/// What the destination must accept before RAM moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Compatibility {
    pub level: u32,
    pub pages: u64,
}

impl Compatibility {
    pub fn encode(self) -> Vec<u8> {
        [&MAGIC.to_le_bytes()[..], &self.level.to_le_bytes(), &self.pages.to_le_bytes()].concat()
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut from = Reader(bytes);
        from.magic()?;
        let level = u32::from_le_bytes(from.take()?);
        let pages = from.u64()?;
        from.end()?;
        Ok(Self { level, pages })
    }
}

fn working_set(wanted_pages: Option<u64>, share_pages: u64) -> u64 {
    wanted_pages.unwrap_or(share_pages).min(share_pages)
}

/// Takes numbers from the front.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (head, tail) =
            self.0.split_first_chunk().ok_or_else(|| format!("it ends {N} bytes too early"))?;
        self.0 = tail;
        Ok(*head)
    }
    fn u16(&mut self) -> Result<u16, String> {
        self.take().map(u16::from_le_bytes)
    }
    fn u64(&mut self) -> Result<u64, String> {
        self.take().map(u64::from_le_bytes)
    }
    fn magic(&mut self) -> Result<(), String> {
        let found = u32::from_le_bytes(self.take()?);
        if found == MAGIC { Ok(()) } else { Err(format!("magic {found:#010x} instead of {MAGIC:#010x}")) }
    }
    fn end(&self) -> Result<(), String> {
        if self.0.is_empty() { Ok(()) } else { Err(format!("{} bytes too many", self.0.len())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_ram::{Backing, RamBlock};

    fn ram() -> GuestRam {
        let block = |name: &str| RamBlock::new(name, 40 * 4096, Backing::Anonymous).unwrap();
        GuestRam::new(vec![block("a"), block("b")]).unwrap()
    }

    fn state() -> GuestState {
        let config = ProcessConfig { workers: 3, fill: Fill::Half(9), ..ProcessConfig::default() };
        let mut state = GuestState::initial(&config, &share::divide(&ram(), 3)).unwrap();
        state.workers[1].steps = 77;
        state.workers[1].partial_words = 5;
        assert!(state.workers[1].change(Pattern::Random, Some(4), 26));
        state
    }

    #[test]
    fn state_encoded_decodes_to_itself() {
        assert_eq!(GuestState::decode(&state().encode(), &ram()), Ok(state()));
    }

    #[test]
    fn state_truncated_anywhere_is_refused() {
        let bytes = state().encode();
        for len in 0..bytes.len() {
            assert!(GuestState::decode(&bytes[..len], &ram()).is_err(), "{len}");
        }
        assert!(GuestState::decode(&[&bytes[..], &[0]].concat(), &ram()).is_err());
    }

    #[test]
    fn state_with_any_byte_changed_is_refused_or_usable() {
        let bytes = state().encode();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                if let Ok(state) = GuestState::decode(&bad, &ram()) {
                    for (worker, share) in
                        state.workers.iter().zip(share::divide(&ram(), state.workers.len()))
                    {
                        assert!(worker.history.current().working_set_pages <= share.pages());
                        assert!(worker.partial_words < state.plan.count());
                    }
                }
            }
        }
    }

    #[test]
    fn change_within_a_step_holds_from_the_step_after() {
        let state = state();
        assert_eq!(state.workers[1].history.current().first_step, 79);
    }
}
