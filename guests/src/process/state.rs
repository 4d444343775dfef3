//! The guest's state outside RAM, and its bytes in the stream.
//!
//! Section `process-guest`, version 1, all numbers little endian:
//! - magic;
//! - words per page (u16; bit 15: acts follow the fill);
//! - fill (u8 kind, u64 seed);
//! - acts (three u8: of 256 steps those that store zeros, give a page back, give many back);
//! - id of the boot whose clock is meant (16 bytes);
//! - number of workers (u16);
//! - for each worker: seed, steps, words written of the next step (u16), beats, longest gap and last beat
//!   (ns), number of epochs (u16);
//! - for each epoch of the worker, after its number: first step, pattern, pages of the working set.
//!
//! Section `process-guest-compatibility`, version 1: magic, level (u32), pages of RAM (u64).

use std::time::Duration;

use sterna::VmError;
use sterna_ram::GuestRam;

use super::config::MOST_WORKERS;
use super::live::Progress;
use super::{ProcessConfig, ProcessError, clock};
use crate::model::{Act, Acts, Epoch, Fill, History, Pattern, Share, WORDS_PER_PAGE, WordPlan, share};

const MAGIC: u32 = 0x5047_5354;
/// Flag next to the words per page: not every step writes words. A guest without such steps keeps the older
/// encoding.
const HAS_ACTS: u16 = 1 << 15;

/// All state of a guest outside RAM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GuestState {
    pub plan: WordPlan,
    pub fill: Fill,
    pub acts: Acts,
    pub workers: Vec<WorkerState>,
}

/// The state of a paused worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WorkerState {
    pub seed: u64,
    pub steps: u64,
    /// Words of its page that the step after `steps` has written, or zeroed.
    pub partial_words: usize,
    pub history: History,
    pub beats: u64,
    pub max_gap_ns: u64,
    /// Time of the last beat; 0 for none, or for another machine's clock.
    pub last_beat_ns: u64,
}

impl GuestState {
    /// The state of a guest that has taken no step.
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
        Ok(Self { plan: config.words, fill: config.fill, acts: config.acts, workers })
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

    /// Changes the pattern from every worker's next step on.
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
        let has_acts = if self.acts.zeroes() { HAS_ACTS } else { 0 };
        put(&(self.plan.count() as u16 | has_acts).to_le_bytes());
        let (kind, seed) = match self.fill {
            Fill::Zero => (0u8, 0),
            Fill::Random(seed) => (1, seed),
            Fill::Half(seed) => (2, seed),
        };
        put(&[kind]);
        put(&seed.to_le_bytes());
        if self.acts.zeroes() {
            put(&self.acts.of_256());
        }
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

    /// Decodes the output of [`GuestState::encode`] for a guest in `ram`. The error names the broken rule.
    pub fn decode(bytes: &[u8], ram: &GuestRam) -> Result<Self, String> {
        let mut from = Reader(bytes);
        from.magic()?;
        let words = from.u16()?;
        let has_acts = words & HAS_ACTS != 0;
        let words = usize::from(words & !HAS_ACTS);
        let plan = WordPlan::new(words).ok_or(format!("{words} words in a page"))?;
        let fill = match (from.take::<1>()?, from.u64()?) {
            ([0], _) => Fill::Zero,
            ([1], seed) => Fill::Random(seed),
            ([2], seed) => Fill::Half(seed),
            ([kind], _) => return Err(format!("fill of kind {kind}")),
        };
        let acts = match has_acts {
            true => {
                let [zero, discard, balloon] = from.take()?;
                let acts = Acts::new(zero, discard, balloon).filter(|acts| acts.zeroes());
                acts.ok_or(format!("acts of {zero}, {discard} and {balloon} of 256"))?
            }
            false => Acts::WRITES,
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
                WorkerState::decode(&mut from, (plan, acts), share.pages(), same_clock)
                    .map_err(|why| format!("worker {index}: {why}"))
            })
            .collect();
        from.end()?;
        Ok(Self { plan, fill, acts, workers: workers? })
    }
}

impl WorkerState {
    pub fn is_idle(&self) -> bool {
        self.history.current().pattern == Pattern::Idle
    }

    /// Changes the pattern from the next step that has not begun. Returns false if the history is full.
    pub fn change(&mut self, pattern: Pattern, working_set_pages: Option<u64>, share_pages: u64) -> bool {
        let first_step = self.steps + 1 + u64::from(self.partial_words > 0);
        self.history.change(first_step, pattern, working_set(working_set_pages, share_pages))
    }

    fn decode(
        from: &mut Reader<'_>,
        (plan, acts): (WordPlan, Acts),
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
        let words = words_in_flight(acts.act(seed, steps + 1), plan);
        if partial_words >= words.max(1) || (partial_words > 0 && history.page(seed, steps + 1).is_none()) {
            return Err(format!("{partial_words} words of a step that has {words}"));
        }
        let last_beat_ns = if same_clock { last_beat_ns } else { 0 };
        Ok(Self { seed, steps, partial_words, history, beats, max_gap_ns, last_beat_ns })
    }
}

/// The record that the destination must accept before RAM is sent.
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

/// Number of words after which a step with this act can be interrupted.
///
/// 0 if the step gives memory back in one call.
pub(super) fn words_in_flight(act: Act, plan: WordPlan) -> usize {
    match act {
        Act::Write => plan.count(),
        Act::Zero => WORDS_PER_PAGE,
        Act::Discard | Act::Balloon => 0,
    }
}

fn working_set(wanted_pages: Option<u64>, share_pages: u64) -> u64 {
    wanted_pages.unwrap_or(share_pages).min(share_pages)
}

/// Reads numbers from the front of the bytes.
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

    /// A guest whose next step stores zeros and has zeroed more words than a step writes.
    fn zeroing() -> GuestState {
        let mut state = GuestState { acts: Acts::MIXED, plan: WordPlan::TIDE, ..state() };
        let seed = state.workers[0].seed;
        let zeroes = |step: &u64| Acts::MIXED.act(seed, step + 1) == Act::Zero;
        state.workers[0].steps = (10..).find(zeroes).unwrap();
        state.workers[0].partial_words = WORDS_PER_PAGE - 1;
        (state.workers[1].steps, state.workers[1].partial_words) = (78, 0);
        state
    }

    #[test]
    fn state_of_a_guest_that_makes_pages_zero_decodes_to_itself() {
        assert_eq!(GuestState::decode(&zeroing().encode(), &ram()), Ok(zeroing()));
        let mut torn = zeroing();
        torn.workers[0].partial_words = WORDS_PER_PAGE;
        assert!(GuestState::decode(&torn.encode(), &ram()).is_err());
    }

    #[test]
    fn state_truncated_anywhere_is_refused() {
        for state in [state(), zeroing()] {
            let bytes = state.encode();
            for len in 0..bytes.len() {
                assert!(GuestState::decode(&bytes[..len], &ram()).is_err(), "{len}");
            }
            assert!(GuestState::decode(&[&bytes[..], &[0]].concat(), &ram()).is_err());
        }
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
                        assert!(worker.partial_words < WORDS_PER_PAGE);
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
