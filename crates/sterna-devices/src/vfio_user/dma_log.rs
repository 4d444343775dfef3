//! What a vfio-user device writes into guest RAM, as a dirty source.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use sterna_ram::dirty::LoggedRange;
use sterna_ram::{
    DirtyBitmaps, DirtyError, DirtySource, GuestRam, Harvest, PAGE_SIZE, PageBitmap, SyncTimes,
};

use super::client::Client;
use super::wire::DmaLogRange;
use crate::vfio::{MigrationPort, PortError};

const NAME: &str = "vfio-user-dma-log";
const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// The DMA log that a device's process keeps (DMA_LOGGING_START, REPORT, STOP).
///
/// A report takes the bits out of the log, so harvesting re-arms. The server sets a page's bit after it has
/// written the page: a harvest between the two is followed by one that reports it.
#[derive(Debug)]
pub struct DmaLog {
    client: Arc<Client>,
    ram: GuestRam,
    ranges: Vec<LoggedRange>,
    started: Mutex<bool>,
}

impl DmaLog {
    /// The log of `client`'s device over `ranges` of `ram`, which the device must have ([`Client::map_ram`]).
    ///
    /// # Errors
    /// [`DirtyError::GuestRange`] for a range that is not in `ram`.
    pub fn new(client: Arc<Client>, ram: GuestRam, ranges: Vec<LoggedRange>) -> Result<Self, DirtyError> {
        for (index, range) in ranges.iter().enumerate() {
            let refuse = |rule| Err(DirtyError::GuestRange { index, rule });
            let Some(block) = ram.blocks().get(range.block) else {
                return refuse("it names a block that the guest RAM does not have");
            };
            let end = range.first_page.checked_add(range.pages);
            if range.pages == 0 || end.is_none_or(|end| end > block.pages()) {
                return refuse("it does not lie inside its block");
            }
            let bytes = range.pages.checked_mul(PAGE_BYTES);
            if bytes.and_then(|bytes| bytes.checked_add(range.guest_address)).is_none() {
                return refuse("it ends behind the last address");
            }
            if !range.guest_address.is_multiple_of(PAGE_BYTES) {
                return refuse("its guest address is not that of a page");
            }
        }
        Ok(Self { client, ram, ranges, started: Mutex::new(false) })
    }

    /// Asks for a range piece by piece, as long as one report's bitmap may be.
    fn harvest_range(&self, range: &LoggedRange, into: &mut PageBitmap) -> Result<Harvest, PortError> {
        let mut sum = Harvest::default();
        let piece = self.client.longest_report() / PAGE_BYTES;
        let mut done = 0;
        while done < range.pages {
            let pages = piece.min(range.pages - done);
            let began = Instant::now();
            let words = self.client.report_logged(DmaLogRange {
                address: range.guest_address + done * PAGE_BYTES,
                length: pages * PAGE_BYTES,
            })?;
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
        let source = io::Error::other(format!("device {}: {error}", self.client.name()));
        DirtyError::System { origin: NAME, call, what: "range", index: index as u64, source }
    }
}

impl DirtySource for DmaLog {
    fn start(&self) -> Result<(), DirtyError> {
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        if *started {
            return Ok(());
        }
        let range = |range: &LoggedRange| DmaLogRange {
            address: range.guest_address,
            length: range.pages * PAGE_BYTES,
        };
        let ranges: Vec<_> = self.ranges.iter().map(range).collect();
        self.client.start_logging(&ranges).map_err(|error| self.failed("DMA_LOGGING_START", 0, &error))?;
        *started = true;
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyError> {
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::take(&mut *started) {
            return Ok(());
        }
        match self.client.stop_logging() {
            // The log went with the process that kept it.
            Ok(()) | Err(PortError::Gone { .. }) => Ok(()),
            Err(error) => Err(self.failed("DMA_LOGGING_STOP", 0, &error)),
        }
    }

    fn harvest(&self, into: &mut DirtyBitmaps) -> Result<Harvest, DirtyError> {
        if !*self.started.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(DirtyError::NotStarted { origin: NAME });
        }
        let sizes = self.ram.blocks().iter().map(|block| block.pages());
        if !sizes.eq(into.blocks().iter().map(PageBitmap::pages)) {
            let rule = "the bitmaps are not those of the tracked RAM";
            return Err(DirtyError::Range { origin: NAME, block: 0, rule });
        }
        let mut sum = Harvest::default();
        for (index, range) in self.ranges.iter().enumerate() {
            let found = self.harvest_range(range, into.block_mut(range.block));
            sum += found.map_err(|error| self.failed("DMA_LOGGING_REPORT", index, &error))?;
        }
        Ok(sum)
    }

    /// Nothing: a report takes the bits out of the log.
    fn rearm(&self, _: usize, _: u64, _: u64, _: &PageBitmap) -> Result<(), DirtyError> {
        Ok(())
    }

    fn name(&self) -> &'static str {
        NAME
    }
}
