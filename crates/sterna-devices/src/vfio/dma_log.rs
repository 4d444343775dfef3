//! The dirty source for a device's DMA writes to guest RAM, for any logger.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use sterna_ram::dirty::LoggedRange;
use sterna_ram::{
    DirtyBitmaps, DirtyError, DirtySource, GuestRam, PAGE_SIZE, PageBitmap, SyncReport, SyncTimes,
};

use super::error::PortError;

const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// A range of whole pages that a device may write, by guest-physical address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaRange {
    /// First address in bytes.
    pub address: u64,
    /// Length of the range in bytes.
    pub length: u64,
}

/// A log of a device's DMA, implemented by the device's process or by the kernel.
pub trait DmaLogger: Send + Sync {
    /// The dirty source's name in messages and statistics.
    fn log_name(&self) -> &'static str;

    /// The device's name in messages.
    fn device_name(&self) -> String;

    /// Longest range of one report in bytes: whole pages, at least one.
    fn longest_report(&self) -> u64;

    /// Begins to log writes to `ranges`, with one bit per page.
    ///
    /// # Errors
    /// The logger refuses, or cannot be reached.
    fn start_logging(&self, ranges: &[DmaRange]) -> Result<(), PortError>;

    /// Stops logging.
    ///
    /// # Errors
    /// The same as for `start_logging`.
    fn stop_logging(&self) -> Result<(), PortError>;

    /// Pages of `range` that were written since the last report, or since logging began. Bit `n` is the
    /// range's page `n`; bits after its last page have no meaning. The report clears the bits in the log.
    ///
    /// # Errors
    /// The same as for `start_logging`, and an invalid answer.
    fn report_logged(&self, range: DmaRange) -> Result<Vec<u64>, PortError>;
}

/// The log of one device's DMA (DMA_LOGGING_START, REPORT, STOP).
///
/// A report clears the bits in the log, so a sync re-arms. The logger sets a page's bit after the page was
/// written. A sync between the two misses the page, and the next sync reports it.
#[derive(Debug)]
pub struct DmaLog<L> {
    logger: Arc<L>,
    ram: GuestRam,
    ranges: Vec<LoggedRange>,
    started: Mutex<bool>,
}

impl<L: DmaLogger> DmaLog<L> {
    /// A log for `ranges` of `ram`. The device must see RAM at these addresses: mapped in the IOMMU, or
    /// handed to its process ([`crate::vfio_user::Client::map_ram`]).
    ///
    /// # Errors
    /// [`DirtyError::GuestRange`] for a range that is not in `ram`.
    pub fn new(logger: Arc<L>, ram: GuestRam, ranges: Vec<LoggedRange>) -> Result<Self, DirtyError> {
        for (index, range) in ranges.iter().enumerate() {
            let refuse = |rule| Err(DirtyError::GuestRange { index, rule });
            let Some(block) = ram.blocks().get(range.block) else {
                return refuse("it names a block that the guest RAM does not have");
            };
            let end = range.first_page.checked_add(range.pages);
            if range.pages == 0 || end.is_none_or(|end| end > block.pages()) {
                return refuse("it is not inside its block");
            }
            let bytes = range.pages.checked_mul(PAGE_BYTES);
            if bytes.and_then(|bytes| bytes.checked_add(range.guest_address)).is_none() {
                return refuse("it ends after the last address");
            }
            if !range.guest_address.is_multiple_of(PAGE_BYTES) {
                return refuse("its guest address is not page-aligned");
            }
        }
        Ok(Self { logger, ram, ranges, started: Mutex::new(false) })
    }

    /// Reads a range in pieces, each as long as one report permits.
    fn sync_range(&self, range: &LoggedRange, into: &mut PageBitmap) -> Result<SyncReport, PortError> {
        let mut sum = SyncReport::default();
        let piece = self.logger.longest_report() / PAGE_BYTES;
        let mut done = 0;
        while done < range.pages {
            let pages = piece.min(range.pages - done);
            let began = Instant::now();
            let mut words = self.logger.report_logged(DmaRange {
                address: range.guest_address + done * PAGE_BYTES,
                length: pages * PAGE_BYTES,
            })?;
            keep(&mut words, pages);
            let asked = Instant::now();
            let first = range.first_page + done;
            sum.newly_dirty += into.merge_words(first, &words);
            let mut times = SyncTimes { vhost: asked - began, ..SyncTimes::default() };
            let merging = if first.is_multiple_of(64) { &mut times.aligned } else { &mut times.misaligned };
            *merging = asked.elapsed();
            sum.times += times;
            done += pages;
        }
        Ok(sum)
    }

    fn failed(&self, call: &'static str, index: usize, error: &PortError) -> DirtyError {
        let source = io::Error::other(format!("device {}: {error}", self.logger.device_name()));
        DirtyError::System {
            origin: self.logger.log_name(),
            call,
            what: "range",
            index: index as u64,
            source,
        }
    }
}

impl<L: DmaLogger> DirtySource for DmaLog<L> {
    fn start(&self) -> Result<(), DirtyError> {
        let mut started = self.started.lock();
        if *started {
            return Ok(());
        }
        let range =
            |range: &LoggedRange| DmaRange { address: range.guest_address, length: range.pages * PAGE_BYTES };
        let ranges: Vec<_> = self.ranges.iter().map(range).collect();
        self.logger.start_logging(&ranges).map_err(|error| {
            if !matches!(error, PortError::Refused { .. }) {
                // The logger may still log, now or when it resumes, and would then refuse the next start. A
                // failure of this stop has no consequence, because the start has failed already.
                let _ = self.logger.stop_logging();
            }
            self.failed("DMA_LOGGING_START", 0, &error)
        })?;
        *started = true;
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        let mut started = self.started.lock();
        if !std::mem::take(&mut *started) {
            return Ok(());
        }
        match self.logger.stop_logging() {
            // The log ended together with its logger.
            Ok(()) | Err(PortError::Gone { .. }) => Ok(()),
            Err(error) => Err(self.failed("DMA_LOGGING_STOP", 0, &error)),
        }
    }

    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        if !*self.started.lock() {
            return Err(DirtyError::NotStarted { origin: self.logger.log_name() });
        }
        let sizes = self.ram.blocks().iter().map(|block| block.pages());
        if !sizes.eq(into.blocks().iter().map(PageBitmap::pages)) {
            let rule = "the bitmaps belong to other RAM than the tracked RAM";
            return Err(DirtyError::Range { origin: self.logger.log_name(), block: 0, rule });
        }
        let mut sum = SyncReport::default();
        for (index, range) in self.ranges.iter().enumerate() {
            let found = self.sync_range(range, into.block_mut(range.block));
            sum += found.map_err(|error| self.failed("DMA_LOGGING_REPORT", index, &error))?;
        }
        Ok(sum)
    }

    /// Nothing to do: a report clears the bits in the log.
    fn rearm(&self, _: usize, _: u64, _: u64, _: &PageBitmap) -> Result<(), DirtyError> {
        Ok(())
    }

    fn name(&self) -> &'static str {
        self.logger.log_name()
    }
}

/// Clears the bits after the first `pages`. They belong to no page, and would be mistaken for the following
/// pages.
pub(crate) fn keep(words: &mut Vec<u64>, pages: u64) {
    let needed = pages.div_ceil(64);
    words.truncate(usize::try_from(needed).unwrap_or(usize::MAX));
    if let (true, Some(last), rest @ 1..) = (words.len() as u64 == needed, words.last_mut(), pages % 64) {
        *last &= u64::MAX >> (64 - rest);
    }
}
