//! Stores received pages in guest RAM, in place.

mod record;
#[cfg(feature = "rdma")]
mod remote;

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sterna_ram::{
    Backing, DirtyBitmaps, Emptied, GuestRam, PAGE_SIZE, PageBitmap, RamBlock, RamError, RamSlice, Run,
};

use self::record::{Memory, Record};
use super::PageSink;
use crate::error::{BadPage, MachineDifference, MigrationError};
use crate::order::PageRun;

/// Stores pages directly in guest RAM.
///
/// A zero page that was not received before leaves fresh memory untouched, so that a sparse guest stays sparse.
/// The memory's owner may declare it fresh ([`RamBlock::declare_fresh`]). Otherwise the kernel is asked which
/// pages are in memory, before the first page is stored. Those pages may hold bytes, for example of an earlier
/// migration. Each of them is compared, and cleared if it is not zero. This happens when the page is received
/// as zero, or at the end if it was not received. [`Record`] has the rule, and a simulator tests it.
///
/// Read-only blocks are not written. Their pages are stored in other memory, and compared at the end.
pub struct RamSink {
    guest: GuestRam,
    /// The memory for the pages: the guest's blocks, and other memory for read-only blocks.
    ram: GuestRam,
    /// The state of the pages of `ram`.
    record: Record,
    /// Guards the question to the kernel which pages are in memory. It is asked before the first page is
    /// stored.
    looked: Once,
    may_hold_bytes: Vec<bool>,
    /// Per block: whether pages may be unpopulated. They are populated just before their payload is read.
    populates: Vec<bool>,
    /// Per block: whether an adapter follows its memory and may write any page at any time
    /// ([`RamSink::follow`]).
    is_followed: Vec<AtomicBool>,
    cleared: AtomicU64,
    /// The source's own memory is mapped instead, so no page is stored, compared or cleared.
    is_closed: AtomicBool,
}

impl RamSink {
    /// A sink into `guest`. `may_hold_bytes`: for each block, whether the VMM has written bytes there. They
    /// stay where no page is received.
    ///
    /// # Errors
    /// The memory for pages of read-only blocks cannot be allocated.
    pub fn new(guest: &GuestRam, may_hold_bytes: Vec<bool>) -> Result<Self, RamError> {
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
            record: Record::new(guest),
            looked: Once::new(),
            populates: ram.blocks().iter().map(|block| !block.is_fully_populated()).collect(),
            is_followed: ram.blocks().iter().map(|_| AtomicBool::new(false)).collect(),
            guest: guest.clone(),
            ram,
            may_hold_bytes,
            cleared: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
        })
    }

    /// Closes the sink, because the source's own memory is mapped to the guest's blocks. From now on no page is
    /// stored, compared or cleared.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    fn is_followed(&self, block: usize) -> bool {
        self.is_followed[block].load(Ordering::Acquire)
    }

    /// Whether the sink is [closed](RamSink::close).
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Refuses a page after the source has handed its memory over.
    fn check_open(&self, run: PageRun) -> Result<(), MigrationError> {
        if !self.is_closed() {
            return Ok(());
        }
        let block = self.guest.block(run.block).name().to_owned();
        Err(BadPage::HandedOver { block, offset: run.first * PAGE_SIZE as u64 }.into())
    }

    /// The memory for the pages: the guest's blocks, and other memory for read-only blocks.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Pages that were received, with content or as zero.
    pub fn received(&self) -> &DirtyBitmaps {
        self.record.received()
    }

    /// Marks pages as not received, because the source has changed them since.
    pub fn forget(&self, block: usize, first: u64, count: u64) {
        self.record.forget(PageRun { block, first, count });
    }

    /// Number of zero pages that had to be read, and were cleared if they were not zero.
    pub fn cleared_pages(&self) -> u64 {
        self.cleared.load(Ordering::Relaxed)
    }

    /// Completes RAM after all pages were received. Clears pages that were in memory before and were not
    /// received. Compares the pages of read-only blocks.
    ///
    /// If the connection is lost before the commit, more pages may arrive, and this is called again.
    ///
    /// # Errors
    /// [`MigrationError::Ram`]; [`MigrationError::PeerIncompatible`] if the bytes of a read-only block differ
    /// from the source's.
    pub fn finish(&self) -> Result<(), MigrationError> {
        if self.is_closed() {
            return Ok(());
        }
        for (index, block) in self.guest.blocks().iter().enumerate() {
            if block.is_read_only() {
                self.compare(index)?;
            } else if !self.may_hold_bytes[index] && !self.is_followed(index) {
                self.count(self.looked().finish(index, &self.ram)?);
            }
        }
        Ok(())
    }

    /// Makes a block all zero after the migration has failed.
    ///
    /// If the block's owner permits it, the memory is given back to the host. Otherwise pages that may hold
    /// bytes are compared and cleared. Returns the reason if memory could not be given back although it was
    /// permitted. A read-only block was not written, and is left unchanged.
    ///
    /// # Errors
    /// Zeros cannot be stored.
    pub fn empty(&self, index: usize) -> Result<Option<RamError>, MigrationError> {
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
        if self.is_followed(index) {
            block.zero_pages(0, block.pages())?;
        } else {
            self.count(self.looked().empty(index, &self.ram)?);
        }
        Ok(None)
    }

    /// The state of the pages. The first call asks the kernel which pages may hold bytes.
    fn looked(&self) -> &Record {
        self.looked.call_once(|| {
            let mut is_asked = false;
            for (index, block) in self.ram.blocks().iter().enumerate() {
                if block.take_fresh() && !self.may_hold_bytes[index] {
                    continue;
                }
                is_asked = true;
                let absent = PageBitmap::new(block.pages());
                if let Err(error) = block.mark_absent(0, block.pages(), &absent) {
                    // All pages count as populated then, and are read.
                    tracing::warn!("cannot find out which pages are populated: {error}");
                    absent.clear_all();
                }
                self.record.found(index, &absent);
            }
            // Pages that may be populated are compared with zero, which takes time and has no other effect.
            if is_asked && let Err(unknown) = self.ram.check_page_table() {
                tracing::warn!("{unknown}");
            }
        });
        &self.record
    }

    /// Counts pages that were read, and were cleared if they were not zero.
    fn count(&self, cleared: u64) {
        self.cleared.fetch_add(cleared, Ordering::Relaxed);
    }

    /// Compares the received pages of a read-only block with the block's content.
    fn compare(&self, index: usize) -> Result<(), MigrationError> {
        let (guest, came) = (self.guest.block(index), self.record.received().block(index));
        let (mut ours, mut theirs) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        let mut from = 0;
        while let Some(run) = came.next_run(from, came.pages(), came.pages()) {
            for page in run.first..run.end() {
                let offset = page * PAGE_SIZE as u64;
                guest.read(offset, &mut ours)?;
                self.ram.block(index).read(offset, &mut theirs)?;
                if let Some(at) = ours.iter().zip(&theirs).position(|(ours, theirs)| ours != theirs) {
                    let block = guest.name().to_owned();
                    return Err(MachineDifference::ReadOnlyBlock { block, offset: offset + at as u64 }.into());
                }
            }
            from = run.end();
        }
        Ok(())
    }
}

impl Memory for GuestRam {
    type Error = RamError;

    fn zero(&self, run: PageRun) -> Result<(), RamError> {
        self.block(run.block).zero_present_pages(run.first, run.count)
    }

    fn pinned_in(&self, run: PageRun) -> Option<Run> {
        self.block(run.block).pinned_in(run.first, run.count)
    }
}

impl PageSink for RamSink {
    fn prepare(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError> {
        self.check_open(run)?;
        let block = self.ram.block(run.block);
        let slice = block.slice(run.first * PAGE_SIZE as u64, run.count as usize * PAGE_SIZE)?;
        if self.looked().content(run) > 0 && self.populates[run.block] {
            block.populate(run.first, run.count)?;
        }
        Ok(slice)
    }

    fn commit(&self, _run: PageRun) -> Result<(), MigrationError> {
        Ok(())
    }

    fn zero(&self, run: PageRun) -> Result<(), MigrationError> {
        self.check_open(run)?;
        if self.is_followed(run.block) {
            // The kernel knows which pages are populated, and they may be given back, because the adapter does
            // not pin them.
            self.ram.block(run.block).zero_pages(run.first, run.count)?;
            self.record.came(run);
        } else {
            self.count(self.looked().zero(run, &self.ram)?);
        }
        Ok(())
    }

    fn current(&self, run: PageRun, to: &mut [u8]) -> Result<(), MigrationError> {
        self.check_open(run)?;
        let received = self.record.received().block(run.block);
        if let Some(missing) = (run.first..run.end()).find(|page| !received.get(*page)) {
            let block = self.ram.block(run.block).name().to_owned();
            return Err(BadPage::DifferenceToNothing { block, offset: missing * PAGE_SIZE as u64 }.into());
        }
        Ok(self.ram.block(run.block).read(run.first * PAGE_SIZE as u64, to)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Misbehaviour;

    #[test]
    fn difference_to_a_page_that_never_came_is_refused_by_its_name() {
        let block = RamBlock::new("m0", 8 * PAGE_SIZE as u64, Backing::Memfd).unwrap();
        // Bytes of an earlier migration.
        block.write(3 * PAGE_SIZE as u64, &[1]).unwrap();
        let sink = RamSink::new(&GuestRam::new(vec![block]).unwrap(), vec![false]).unwrap();
        let page = |first| PageRun { block: 0, first, count: 1 };
        let mut content = [7; PAGE_SIZE];

        let refused = sink.current(page(3), &mut content).unwrap_err();
        let MigrationError::PeerMisbehaved(Misbehaviour::Page(why)) = refused else { panic!("{refused}") };
        assert_eq!(why, BadPage::DifferenceToNothing { block: "m0".into(), offset: 0x3000 });
        assert_eq!(content, [7; PAGE_SIZE]);

        sink.zero(page(3)).unwrap();
        sink.current(page(3), &mut content).unwrap();
        assert_eq!(content, [0; PAGE_SIZE]);
    }

    /// The connection is lost after all pages were received, and the guest clears a page before the source
    /// reconnects.
    #[test]
    fn page_that_becomes_zero_after_all_had_come_is_cleared() {
        for backing in [Backing::Memfd, Backing::Anonymous] {
            let ram = GuestRam::new(vec![RamBlock::new("ram", 64 << 12, backing).unwrap()]).unwrap();
            let sink = RamSink::new(&ram, vec![false]).unwrap();
            let all = PageRun { block: 0, first: 0, count: 64 };
            sink.prepare(all).unwrap().copy_from(&[7; 64 * PAGE_SIZE]).unwrap();
            sink.finish().unwrap();

            sink.zero(PageRun { count: 9, ..all }).unwrap();
            sink.finish().unwrap();

            let stale: Vec<_> =
                (0..9).filter(|page| !ram.block(0).page(*page).unwrap().is_zero().unwrap()).collect();
            assert!(stale.is_empty(), "{backing:?}: {stale:?}");
            assert!(!ram.block(0).page(9).unwrap().is_zero().unwrap());
        }
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
