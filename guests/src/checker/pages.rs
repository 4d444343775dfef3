//! Compares every page of a guest with its expected content.

use sterna_ram::{GuestRam, PAGE_SIZE, PageBitmap};

use super::diagnose::{Facts, diagnose};
use super::verdict::Tally;
use super::{CheckError, Cut, InFlight, PagePlace, Violation, WorkerCut};
use crate::model::words::overlay;
use crate::model::{Act, Fill, Last, PageId, PageWords, WORDS_PER_PAGE};

/// Number of pages that a thread checks before it takes the next part.
const CHUNK_PAGES: u64 = 16 << 10;
const MOST_THREADS: usize = 4;
const LOW_HALF: u64 = 0xffff_ffff;

pub(super) fn check(ram: &GuestRam, cut: &Cut, tally: &mut Tally) -> Result<(), CheckError> {
    let absent = absent_pages(ram)?;
    for (index, worker) in cut.workers.iter().enumerate() {
        tally.steps += worker.steps;
        let pages = worker.share.pages();
        let next_page = worker.history.page(worker.seed, worker.steps.saturating_add(1));
        // If the words fill the page, or the fill is zero, no other content can be below the words.
        let bases = cut.plan.count() < WORDS_PER_PAGE && cut.fill != Fill::Zero;
        let last = worker.history.last_steps(worker.seed, worker.steps, pages, cut.acts, bases);
        let view = View { ram, cut, absent: &absent, index, worker, next_page, last };
        for part in view.check_all(pages)? {
            tally.append(part);
        }
    }
    Ok(())
}

fn absent_pages(ram: &GuestRam) -> Result<Vec<PageBitmap>, CheckError> {
    ram.blocks()
        .iter()
        .map(|block| {
            let absent = PageBitmap::new(block.pages());
            block.mark_absent(0, block.pages(), &absent)?;
            Ok(absent)
        })
        .collect()
}

/// One worker's share, and the known facts about it.
struct View<'a> {
    ram: &'a GuestRam,
    cut: &'a Cut,
    absent: &'a [PageBitmap],
    index: usize,
    worker: &'a WorkerCut,
    next_page: Option<u64>,
    last: Vec<Last>,
}

impl View<'_> {
    fn check_all(&self, pages: u64) -> Result<Vec<Tally>, CheckError> {
        let chunks: Vec<_> = (0..pages)
            .step_by(CHUNK_PAGES as usize)
            .map(|from| (from, CHUNK_PAGES.min(pages - from)))
            .collect();
        let threads =
            std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS).min(chunks.len());
        if threads <= 1 {
            return chunks.into_iter().map(|(from, count)| self.check_chunk(from, count)).collect();
        }
        let each = chunks.len().div_ceil(threads);
        std::thread::scope(|scope| {
            let running: Vec<_> = chunks
                .chunks(each)
                .map(|part| {
                    scope.spawn(|| {
                        part.iter().map(|&(from, count)| self.check_chunk(from, count)).collect::<Vec<_>>()
                    })
                })
                .collect();
            running
                .into_iter()
                .flat_map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        })
    }

    fn check_chunk(&self, from: u64, count: u64) -> Result<Tally, CheckError> {
        let mut tally = Tally::default();
        let mut bytes = [0; PAGE_SIZE];
        let mut found = [0; WORDS_PER_PAGE];
        let mut expected = [0; WORDS_PER_PAGE];
        for page in from..from + count {
            let Some((block_index, block_page)) = self.worker.share.locate(page) else { continue };
            let block = &self.ram.blocks()[block_index];
            let last = self.last[page as usize];
            let id = PageId::new(self.index, page);
            tally.pages += 1;
            tally.written += u64::from(last.step > 0);
            let is_absent = self.absent[block_index].get(block_page);
            let is_next = self.next_page == Some(page);
            let is_untouched = last.step == 0 && self.cut.fill.is_zero(id);
            if is_absent && !is_next && (is_untouched || last.is_zero) {
                continue;
            }
            if is_absent {
                found = [0; WORDS_PER_PAGE];
            } else {
                block.read(block_page * PAGE_SIZE as u64, &mut bytes)?;
                for (word, bytes) in found.iter_mut().zip(bytes.as_chunks::<8>().0) {
                    *word = u64::from_le_bytes(*bytes);
                }
            }
            self.demand(id, last, &mut expected);
            if is_next {
                self.demand_next(id, &found, &mut expected);
            }
            if found != expected {
                let facts =
                    Facts { cut: self.cut, id, expected_step: last.step, newest_step: self.worker.steps };
                let damage = diagnose(&facts, &found, &expected);
                let place = PagePlace {
                    worker: self.index,
                    page,
                    block: block.name().to_owned(),
                    offset: block_page * PAGE_SIZE as u64,
                };
                tally.add(Violation::Page { place, expected_step: last.step, is_zero: last.is_zero, damage });
            }
        }
        Ok(tally)
    }

    /// Computes the page as the last counted step left it.
    fn demand(&self, id: PageId, last: Last, expected: &mut PageWords) {
        let plan = self.cut.plan;
        if last.is_zero || last.is_over_zeros {
            *expected = [0; WORDS_PER_PAGE];
        } else if last.step == 0 || plan.count() < WORDS_PER_PAGE {
            self.cut.fill.put(id, expected);
        }
        if last.step > 0 && !last.is_zero {
            overlay(expected, last.step, id, plan, plan.count());
        }
    }

    /// Adds the effect of the step in flight, as reported or as found in the page.
    fn demand_next(&self, id: PageId, found: &PageWords, expected: &mut PageWords) {
        let Some(next) = self.worker.steps.checked_add(1) else { return };
        match self.cut.acts.act(self.worker.seed, next) {
            Act::Write => self.demand_words(next, id, found, expected),
            Act::Zero => {
                let count = match self.worker.in_flight {
                    InFlight::Words(count) => count.min(WORDS_PER_PAGE),
                    InFlight::Unknown | InFlight::UnknownHalves => {
                        found.iter().take_while(|word| **word == 0).count()
                    }
                };
                expected[..count].fill(0);
            }
            // Memory is given back between two steps, so such a step is never partly done.
            Act::Discard | Act::Balloon => {}
        }
    }

    /// Adds the words of the step in flight.
    fn demand_words(&self, next: u64, id: PageId, found: &PageWords, expected: &mut PageWords) {
        let plan = self.cut.plan;
        let mut new = *expected;
        overlay(&mut new, next, id, plan, plan.count());
        let fitting = || plan.slots().take_while(|&slot| found[slot] == new[slot]).count();
        let count = match self.worker.in_flight {
            InFlight::Words(count) => count.min(plan.count()),
            InFlight::Unknown | InFlight::UnknownHalves => fitting(),
        };
        overlay(expected, next, id, plan, count);
        if self.worker.in_flight == InFlight::UnknownHalves && count < plan.count() {
            let slot = plan.slot(count);
            let half = expected[slot] & !LOW_HALF | new[slot] & LOW_HALF;
            if found[slot] == half {
                expected[slot] = half;
            }
        }
    }
}
