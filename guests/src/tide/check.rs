//! Access to the guest's control pages in RAM: checker, progress, remote control.

use std::sync::atomic::{Ordering, fence};

use sterna_ram::{GuestRam, PAGE_SIZE};

use super::control::{self, CONSTANTS, EPOCHS_MAX, FIRST_EPOCH};
use super::{LOAD_ADDRESS, Tide, TideError};
use crate::checker::{CheckError, Cut, InFlight, Verdict, Violation, Witness, WorkerCut, check};
use crate::model::{Epoch, History, Pattern, WORDS_PER_PAGE, WordPlan};

/// The progress of a tide.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TideProgress {
    /// Steps that each vCPU has taken.
    pub steps: Vec<u64>,
    /// Iterations of each vCPU's main loop.
    pub beats: Vec<u64>,
    /// The largest number of ticks of the time-stamp counter between two beats of one vCPU. This is the
    /// longest pause that the guest observed.
    pub max_gap_ticks: u64,
    /// Number of times that a vCPU's time-stamp counter went backwards. Must be 0.
    pub clock_went_back: u64,
    /// Number of requests that a vCPU refused.
    pub refused: u64,
}

impl TideProgress {
    /// Sum of the steps of all vCPUs.
    pub fn total_steps(&self) -> u64 {
        self.steps.iter().sum()
    }
}

impl Tide {
    /// Checks that RAM is one consistent cut. The guest must be paused (between any two instructions).
    ///
    /// # Errors
    /// [`CheckError::Ram`] if RAM could not be read.
    pub fn check(&self, ram: &GuestRam) -> Result<Verdict, CheckError> {
        match self.cut(ram)? {
            Ok(cut) => check(ram, &cut),
            Err(violations) => Ok(Verdict::Corrupt { pages: 0, total: violations.len() as u64, violations }),
        }
    }

    /// The cut that [`Tide::check`] demands of RAM, or the errors in the control data.
    ///
    /// # Errors
    /// [`CheckError::Ram`] if RAM could not be read.
    pub fn cut(&self, ram: &GuestRam) -> Result<Result<Cut, Vec<Violation>>, CheckError> {
        let mut wrong = Vec::new();
        let mut code = vec![0; PAGE_SIZE];
        let (block, offset) = self.locate(LOAD_ADDRESS);
        ram.blocks()[block].read(offset, &mut code)?;
        if code != self.code() {
            wrong.push(Violation::Control { worker: 0, why: "the guest's code was changed".into() });
        }
        let mut workers = Vec::new();
        for worker in 0..self.shares.len() {
            match self.worker_cut(worker, &self.read_control(ram, worker)?) {
                Ok(cut) => workers.push(cut),
                Err(why) => wrong.push(Violation::Control { worker, why }),
            }
        }
        let acts = self.config.acts();
        let cut = Cut { plan: WordPlan::TIDE, fill: self.config.fill, acts, workers };
        Ok(if wrong.is_empty() { Ok(cut) } else { Err(wrong) })
    }

    /// The guest's progress; also while it runs.
    ///
    /// # Errors
    /// [`TideError::Ram`] if RAM could not be read.
    pub fn progress(&self, ram: &GuestRam) -> Result<TideProgress, TideError> {
        let mut progress = TideProgress::default();
        for worker in 0..self.shares.len() {
            let word = |index| -> Result<u64, TideError> {
                let (block, offset) = self.control_word(worker, index);
                Ok(ram.blocks()[block].read_u64(offset)?)
            };
            progress.steps.push(word(control::STEPS)?);
            progress.beats.push(word(control::BEATS)?);
            progress.max_gap_ticks = progress.max_gap_ticks.max(word(control::MAX_GAP)?);
            progress.clock_went_back += word(control::CLOCK_WENT_BACK)?;
            progress.refused += word(control::REFUSED)?;
        }
        Ok(progress)
    }

    /// Requests another pattern and working set from every vCPU (pages per vCPU; `None`: its whole share).
    ///
    /// A vCPU adopts the request before its next step. A guest can have at most [`EPOCHS_MAX`] patterns in
    /// its life.
    ///
    /// # Errors
    /// [`TideError::Ram`] if RAM could not be read or written.
    pub fn set_pattern(
        &self,
        ram: &GuestRam,
        pattern: Pattern,
        working_set: Option<u64>,
    ) -> Result<(), TideError> {
        self.request(
            ram,
            &[
                (control::REQUEST_PATTERN, pattern as u64),
                (control::REQUEST_WORKING_SET, working_set.unwrap_or(0)),
            ],
        )
    }

    /// Requests another pace from every vCPU.
    ///
    /// The pace is the number of ticks of the time-stamp counter between steps, 0 for full speed.
    ///
    /// # Errors
    /// [`TideError::Ram`] if RAM could not be read or written.
    pub fn set_pace(&self, ram: &GuestRam, ticks: u64) -> Result<(), TideError> {
        self.request(ram, &[(control::REQUEST_PACE, ticks)])
    }

    /// Requests from every vCPU that it resets its longest gap.
    ///
    /// # Errors
    /// [`TideError::Ram`] if RAM could not be written.
    pub fn reset_max_gap(&self, ram: &GuestRam) -> Result<(), TideError> {
        self.write_all(ram, control::REQUEST_GAP_RESET, 1)
    }

    fn request(&self, ram: &GuestRam, wishes: &[(usize, u64)]) -> Result<(), TideError> {
        for &(index, value) in wishes {
            self.write_all(ram, index, value)?;
        }
        // The guest reads the requested values after the count, so the count must be written last.
        fence(Ordering::Release);
        for worker in 0..self.shares.len() {
            let (block, offset) = self.control_word(worker, control::REQUEST_COUNT);
            let count = ram.blocks()[block].read_u64(offset)?;
            ram.blocks()[block].write_u64(offset, count.wrapping_add(1))?;
        }
        Ok(())
    }

    fn write_all(&self, ram: &GuestRam, index: usize, value: u64) -> Result<(), TideError> {
        for worker in 0..self.shares.len() {
            let (block, offset) = self.control_word(worker, index);
            ram.blocks()[block].write_u64(offset, value)?;
        }
        Ok(())
    }

    fn read_control(&self, ram: &GuestRam, worker: usize) -> Result<[u64; WORDS_PER_PAGE], CheckError> {
        let mut page = [0; WORDS_PER_PAGE];
        for (index, word) in page.iter_mut().enumerate() {
            let (block, offset) = self.control_word(worker, index);
            *word = ram.blocks()[block].read_u64(offset)?;
        }
        Ok(page)
    }

    fn worker_cut(&self, worker: usize, page: &[u64; WORDS_PER_PAGE]) -> Result<WorkerCut, String> {
        let start = control::page(self, worker);
        if let Some(&index) = CONSTANTS.iter().find(|&&index| page[index] != start[index]) {
            return Err(format!("word {index} is {:#x} instead of {:#x}", page[index], start[index]));
        }
        let share = self.shares[worker].clone();
        let steps = page[control::STEPS];
        let history = history(page, share.pages())?;
        if history.current().first_step > steps.saturating_add(1) {
            return Err(format!(
                "an epoch from step {} on after {steps} steps",
                history.current().first_step
            ));
        }
        let neighbour = (worker + 1) % self.shares.len();
        Ok(WorkerCut {
            share,
            steps,
            in_flight: InFlight::Unknown,
            history,
            seed: page[control::SEED],
            witness: Some(Witness { worker: neighbour, steps: page[control::WITNESS] }),
        })
    }
}

/// The epochs of a control page. Of several epochs with the same first step, the last one counts.
fn history(page: &[u64; WORDS_PER_PAGE], share_pages: u64) -> Result<History, String> {
    let count = page[control::EPOCHS];
    if count == 0 || count > EPOCHS_MAX as u64 {
        return Err(format!("{count} epochs"));
    }
    let mut epochs: Vec<Epoch> = Vec::new();
    for words in page[FIRST_EPOCH..].chunks_exact(4).take(count as usize) {
        let pattern = Pattern::from_number(words[1]).ok_or(format!("pattern {}", words[1]))?;
        if epochs.last().is_some_and(|last| last.first_step == words[0]) {
            epochs.pop();
        }
        epochs.push(Epoch { first_step: words[0], pattern, working_set_pages: words[2] });
    }
    History::from_epochs(epochs, share_pages)
}
