//! Received pages go into guest RAM, in place.

mod remote;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sterna_ram::{
    Backing, DirtyBitmaps, Emptied, GuestRam, PAGE_SIZE, PageBitmap, RamBlock, RamError, RamSlice,
};

use super::PageSink;
use crate::error::MigrationError;
use crate::order::PageRun;

/// Puts pages straight into guest RAM.
///
/// A zero page that never came before leaves fresh memory alone, so that a sparse guest stays sparse. The memory's owner
/// may declare it fresh ([`RamBlock::declare_fresh`]). Where it is not, the kernel is asked which pages are there before
/// the first page is taken. Those may hold bytes, of a former migration for example: each is compared, and cleared if it
/// is not zero, by the news that it is zero, or at the end if no news of it came.
///
/// Into a block that cannot be written nothing is put: its pages are kept aside, and compared at the end.
pub(crate) struct RamSink {
    guest: GuestRam,
    /// Where pages are put: the guest's blocks, and memory beside those that cannot be written.
    ram: GuestRam,
    /// Pages that may hold bytes: those that were in memory before the first page was taken, and those that came
    /// with content.
    holds: OnceLock<DirtyBitmaps>,
    /// Pages that came, with content or as zero.
    received: DirtyBitmaps,
    may_hold_bytes: Vec<bool>,
    /// Per block: pages may be missing, and are populated just ahead of their payload.
    populates: Vec<bool>,
    /// Per block: an adapter follows its memory and may write any page at any time ([`RamSink::follow`]).
    is_followed: Vec<AtomicBool>,
    cleared: AtomicU64,
    /// The source's own memory is there instead: no page is put, compared or cleared.
    is_closed: AtomicBool,
}

impl RamSink {
    /// A sink into `guest`; `may_hold_bytes` says of each block whether the VMM has put bytes there, which stay where
    /// no page comes.
    ///
    /// # Errors
    /// There is no memory for what comes for blocks that cannot be written.
    pub(crate) fn new(guest: &GuestRam, may_hold_bytes: Vec<bool>) -> Result<Self, RamError> {
        let target = |block: &RamBlock| match block.is_read_only() {
            true => RamBlock::new(block.name(), block.len_bytes(), Backing::Anonymous),
            false => Ok(block.clone()),
        };
        let ram = if guest.blocks().iter().any(RamBlock::is_read_only) {
            GuestRam::new(guest.blocks().iter().map(target).collect::<Result<_, _>>()?)?
        } else {
            guest.clone()
        };
        Ok(Self {
            holds: OnceLock::new(),
            received: DirtyBitmaps::new(guest),
            populates: ram.blocks().iter().map(|block| !block.is_fully_populated()).collect(),
            is_followed: ram.blocks().iter().map(|_| AtomicBool::new(false)).collect(),
            guest: guest.clone(),
            ram,
            may_hold_bytes,
            cleared: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
        })
    }

    /// The source's own memory has come to the guest's blocks: from now on nothing is put there, compared or cleared.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Whether it is [closed](RamSink::close).
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// No page comes to memory that the source has handed over.
    fn check_open(&self, run: PageRun) -> Result<(), MigrationError> {
        if !self.is_closed() {
            return Ok(());
        }
        let (offset, name) = (run.first * PAGE_SIZE as u64, self.guest.block(run.block).name());
        let what = format!(
            "page {offset:#x} of block {name:?} came, and the source had handed its memory over (specs/extension.md §11)"
        );
        Err(MigrationError::PeerMisbehaved { what })
    }

    /// Where pages are put: the guest's blocks, and memory beside those that cannot be written.
    pub(crate) fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Pages that came, with content or as zero.
    pub(crate) fn received(&self) -> &DirtyBitmaps {
        &self.received
    }

    /// These pages count as if they had not come: the source has changed them since.
    pub(crate) fn forget(&self, block: usize, first: u64, count: u64) {
        self.received.block(block).clear_range(first, count);
    }

    /// Zero pages that had to be read, and cleared where they were not zero.
    pub(crate) fn cleared_pages(&self) -> u64 {
        self.cleared.load(Ordering::Relaxed)
    }

    /// All pages have come: clears what was in memory before and was named by none of them, and compares what came for
    /// blocks that cannot be written.
    ///
    /// # Errors
    /// [`MigrationError::Ram`]; [`MigrationError::PeerIncompatible`] if a block that cannot be written holds other bytes
    /// than the source's.
    pub(crate) fn finish(&self) -> Result<(), MigrationError> {
        if self.is_closed() {
            return Ok(());
        }
        for (index, block) in self.guest.blocks().iter().enumerate() {
            if block.is_read_only() {
                self.compare(index)?;
            } else if !self.may_hold_bytes[index] && !self.is_followed(index) {
                let holds = self.holds().block(index);
                for (held, came) in holds.words().iter().zip(self.received.block(index).words()) {
                    held.fetch_and(!came.load(Ordering::Acquire), Ordering::AcqRel);
                }
                self.clear(PageRun { block: index, first: 0, count: holds.pages() })?;
            }
        }
        Ok(())
    }

    /// The migration failed: makes a block all zero. Its memory is given back where the block's owner permits it;
    /// otherwise pages that may hold bytes are compared and cleared. Gives why memory was not given back though it was
    /// permitted. A block that cannot be written was not written, and stays as it is.
    ///
    /// # Errors
    /// Zeros cannot be stored.
    pub(crate) fn empty(&self, index: usize) -> Result<Option<RamError>, MigrationError> {
        let block = self.guest.block(index);
        if block.is_read_only() || block.is_gone() || self.is_closed() {
            return Ok(None);
        }
        if block.permissions().discard {
            return Ok(match block.empty()? {
                Emptied::Freed => None,
                Emptied::Zeroed(why) => Some(why),
            });
        }
        self.clear(PageRun { block: index, first: 0, count: block.pages() })?;
        Ok(None)
    }

    /// Finds out which pages may hold bytes, when the first page comes.
    fn holds(&self) -> &DirtyBitmaps {
        self.holds.get_or_init(|| {
            let holds = DirtyBitmaps::new(&self.ram);
            for (index, block) in self.ram.blocks().iter().enumerate() {
                let held = holds.block(index);
                if block.take_fresh() && !self.may_hold_bytes[index] {
                    continue;
                }
                held.set_all();
                let absent = PageBitmap::new(block.pages());
                if let Err(error) = block.mark_absent(0, block.pages(), &absent) {
                    // All of them are read then.
                    tracing::warn!("cannot find out which pages are populated: {error}");
                    continue;
                }
                for (held, absent) in held.words().iter().zip(absent.words()) {
                    held.fetch_and(!absent.load(Ordering::Relaxed), Ordering::Relaxed);
                }
            }
            holds
        })
    }

    /// Makes those pages of a run zero that may hold bytes. Then they hold none, unless they are registered. Where an
    /// adapter follows the memory, the kernel is asked which pages there are, and may have them back.
    fn clear(&self, run: PageRun) -> Result<(), MigrationError> {
        let (holds, block) = (self.holds().block(run.block), self.ram.block(run.block));
        if self.is_followed(run.block) {
            return Ok(block.zero_pages(run.first, run.count)?);
        }
        let mut page = run.first;
        while let Some(held) = holds.take_run(page, run.end(), run.count) {
            if let Err(error) = block.zero_present_pages(held.first, held.count) {
                holds.set_range(held.first, held.count);
                return Err(error.into());
            }
            remote::hold_what_is_pinned(block, holds, held);
            self.cleared.fetch_add(held.count, Ordering::Relaxed);
            page = held.end();
        }
        Ok(())
    }

    /// Compares what came for a block that cannot be written with what is there.
    fn compare(&self, index: usize) -> Result<(), MigrationError> {
        let (guest, came) = (self.guest.block(index), self.received.block(index));
        let (mut ours, mut theirs) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        let mut from = 0;
        while let Some(run) = came.next_run(from, came.pages(), came.pages()) {
            for page in run.first..run.end() {
                let offset = page * PAGE_SIZE as u64;
                guest.read(offset, &mut ours)?;
                self.ram.block(index).read(offset, &mut theirs)?;
                if let Some(at) = ours.iter().zip(&theirs).position(|(ours, theirs)| ours != theirs) {
                    let what = format!(
                        "RAM block {:?} is mapped read-only here, but differs from the source's at byte {:#x}: give both \
                         sides the same content (firmware), or map it writable",
                        guest.name(),
                        offset + at as u64
                    );
                    return Err(MigrationError::PeerIncompatible { what });
                }
            }
            from = run.end();
        }
        Ok(())
    }
}

impl PageSink for RamSink {
    fn prepare(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError> {
        self.check_open(run)?;
        let block = self.ram.block(run.block);
        let slice = block.slice(run.first * PAGE_SIZE as u64, run.count as usize * PAGE_SIZE)?;
        self.holds().block(run.block).set_range(run.first, run.count);
        let received = self.received.block(run.block);
        if received.set_range(run.first, run.count) > 0 && self.populates[run.block] {
            block.populate(run.first, run.count)?;
        }
        Ok(slice)
    }

    fn commit(&self, _run: PageRun) -> Result<(), MigrationError> {
        Ok(())
    }

    fn zero(&self, run: PageRun) -> Result<(), MigrationError> {
        self.check_open(run)?;
        self.clear(run)?;
        self.received.block(run.block).set_range(run.first, run.count);
        Ok(())
    }

    fn current(&self, run: PageRun, to: &mut [u8]) -> Result<(), MigrationError> {
        self.check_open(run)?;
        let received = self.received.block(run.block);
        if let Some(missing) = (run.first..run.end()).find(|page| !received.get(*page)) {
            let (offset, name) = (missing * PAGE_SIZE as u64, self.ram.block(run.block).name());
            let what = format!(
                "page {offset:#x} of block {name:?} came as a difference, and never before (specs/stream.md §2.4)"
            );
            return Err(MigrationError::PeerMisbehaved { what });
        }
        Ok(self.ram.block(run.block).read(run.first * PAGE_SIZE as u64, to)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_to_a_page_that_never_came_is_refused_by_its_name() {
        let block = RamBlock::new("m0", 8 * PAGE_SIZE as u64, Backing::Memfd).unwrap();
        // Of a former migration.
        block.write(3 * PAGE_SIZE as u64, &[1]).unwrap();
        let sink = RamSink::new(&GuestRam::new(vec![block]).unwrap(), vec![false]).unwrap();
        let page = |first| PageRun { block: 0, first, count: 1 };
        let mut content = [7; PAGE_SIZE];

        let refused = sink.current(page(3), &mut content).unwrap_err();
        assert!(refused.to_string().contains("page 0x3000 of block \"m0\""), "{refused}");
        assert_eq!(content, [7; PAGE_SIZE]);

        sink.zero(page(3)).unwrap();
        sink.current(page(3), &mut content).unwrap();
        assert_eq!(content, [0; PAGE_SIZE]);
    }

    #[test]
    fn page_that_was_in_memory_and_is_never_named_is_cleared_at_the_end() {
        let block = |name: &str| RamBlock::new(name, 64 * PAGE_SIZE as u64, Backing::Memfd).unwrap();
        let ram = GuestRam::new(vec![block("ram"), block("rom")]).unwrap();
        for page in [3, 4, 40] {
            ram.block(0).write(page * PAGE_SIZE as u64, &[1]).unwrap();
            ram.block(1).write(page * PAGE_SIZE as u64, &[1]).unwrap();
        }
        let sink = RamSink::new(&ram, vec![false, true]).unwrap();
        let came = sink.prepare(PageRun { block: 0, first: 4, count: 1 }).unwrap();
        came.copy_from(&[2; PAGE_SIZE]).unwrap();

        sink.finish().unwrap();

        let is_zero = |block: usize, page| ram.block(block).page(page).unwrap().is_zero().unwrap();
        assert!(is_zero(0, 3) && !is_zero(0, 4) && is_zero(0, 40));
        assert!(!is_zero(1, 3) && !is_zero(1, 40), "the VMM has put these there");
        assert_eq!(ram.block(0).resident_bytes().unwrap(), 3 * PAGE_SIZE as u64, "nothing was populated");
    }
}
