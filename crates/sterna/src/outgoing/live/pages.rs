//! Sends the pages of the moment: copies that were made for writers first, then the others in order.

use sterna_ram::{DirtyBitmaps, GuestRam, PAGE_SIZE, PageBitmap, RamSlice};
use sterna_wire::ram::RamRecordWriter;

use super::held::{Copied, Held};
use super::shared::Shared;
use crate::error::MigrationError;
use crate::order::PageRun;
use crate::outgoing::main_stream::{MainStream, PagesPart};
use crate::params::ZeroPageDetection;

/// Pages that are copied, released and written together.
const BATCH_PAGES: u64 = 64;
const PAGE: u64 = PAGE_SIZE as u64;

/// Sends pages until all of them are written.
pub(super) struct Sender<'a> {
    pub(super) shared: &'a Shared,
    pub(super) held: &'a Held,
    pub(super) main: &'a mut MainStream,
}

impl Sender<'_> {
    /// Sends `pages`, which are held.
    pub(super) fn send(&mut self, pages: &DirtyBitmaps) -> Result<(), MigrationError> {
        let shared = self.shared;
        let mut left = pages.count();
        for (block, bits) in pages.blocks().iter().enumerate() {
            let absent = self.absent(block)?;
            let mut from = 0;
            while let Some(run) = bits.next_run(from, bits.pages(), BATCH_PAGES) {
                from = run.end();
                left -= self.copies()?;
                left -= self.run(PageRun { block, first: run.first, count: run.count }, &absent)?;
                shared.remaining(left * PAGE);
            }
        }
        // The rest is being copied for writers.
        while left > 0 {
            self.check()?;
            left -= self.copies()?;
            if left > 0 {
                self.held.await_copy();
            }
        }
        shared.remaining(0);
        self.check()
    }

    fn check(&self) -> Result<(), MigrationError> {
        self.shared.check()?;
        self.held.failure()
    }

    /// Pages that were never populated, which are not read. All pages are held, so that none of them gets content.
    fn absent(&self, block: usize) -> Result<PageBitmap, MigrationError> {
        let ram = &self.shared.ram;
        let absent = PageBitmap::new(ram.block(block).pages());
        if self.shared.params().zero_page_detection != ZeroPageDetection::None {
            self.shared.vm.dirty_source().mark_absent(ram, block, 0, absent.pages(), &absent)?;
        }
        Ok(absent)
    }

    /// Sends the copies that wait, and returns their number of pages.
    fn copies(&mut self) -> Result<u64, MigrationError> {
        let mut sent = 0;
        while let Some(Copied { run, content }) = self.held.take_copy() {
            self.check()?;
            let (ram, counters) = (&self.shared.ram, &self.shared.counters);
            let (mut normal, mut zero) = (0, 0);
            self.main.ram_pages(|records, part| {
                for (page, content) in (run.first..).zip(content.chunks_exact(PAGE_SIZE)) {
                    let place = Place { ram, block: run.block, page };
                    match content.iter().all(|byte| *byte == 0) {
                        true => place.zero(records, part)?,
                        false => {
                            place.header(records, part)?;
                            part.bytes.extend_from_slice(content);
                        }
                    }
                    let counted = if content.iter().all(|byte| *byte == 0) { &mut zero } else { &mut normal };
                    *counted += 1;
                }
                Ok(())
            })?;
            counters.pages(normal, zero);
            self.shared.limiter.take(normal * (PAGE + 8));
            sent += run.count;
        }
        Ok(sent)
    }

    /// Sends the pages of a run that no writer has taken, and returns their number.
    fn run(&mut self, run: PageRun, absent: &PageBitmap) -> Result<u64, MigrationError> {
        let (held, shared) = (self.held, self.shared);
        let mut sent = 0;
        let mut rest = run;
        while rest.count > 0 {
            let Some(taken) = held.send(rest) else { break };
            (rest.first, rest.count) = (taken.end(), run.end() - taken.end());
            let (mut normal, mut zero) = (0, 0);
            let mut is_released = false;
            let written = self.main.ram_pages(|records, part| {
                let copied = copy(&shared.ram, taken, absent, records, part);
                // Writers continue before the stream takes the bytes, and also after an error.
                is_released = true;
                held.sent(taken)?;
                (normal, zero) = copied?;
                shared.check()?;
                held.failure()
            });
            if !is_released {
                held.sent(taken)?;
            }
            written?;
            shared.counters.pages(normal, zero);
            shared.limiter.take(normal * (PAGE + 8));
            sent += taken.count;
        }
        Ok(sent)
    }
}

/// Copies held pages into `part`. Returns the number of pages with content, and of zero pages.
fn copy(
    ram: &GuestRam,
    run: PageRun,
    absent: &PageBitmap,
    records: &mut RamRecordWriter,
    part: &mut PagesPart<'_>,
) -> Result<(u64, u64), MigrationError> {
    let (mut normal, mut zero) = (0, 0);
    for page in run.first..run.end() {
        let place = Place { ram, block: run.block, page };
        let content = match absent.get(page) {
            true => None,
            false => Some(place.content()?).filter(|content| !matches!(content.is_zero(), Ok(true))),
        };
        match content {
            None => {
                place.zero(records, part)?;
                zero += 1;
            }
            Some(content) => {
                place.header(records, part)?;
                let at = part.bytes.len();
                part.bytes.resize(at + PAGE_SIZE, 0);
                content.copy_to(&mut part.bytes[at..])?;
                normal += 1;
            }
        }
    }
    Ok((normal, zero))
}

/// A page of guest RAM.
struct Place<'a> {
    ram: &'a GuestRam,
    block: usize,
    page: u64,
}

impl<'a> Place<'a> {
    fn content(&self) -> Result<RamSlice<'a>, MigrationError> {
        Ok(self.ram.block(self.block).page(self.page)?)
    }

    fn zero(&self, records: &mut RamRecordWriter, part: &mut PagesPart<'_>) -> Result<(), MigrationError> {
        let name = self.ram.block(self.block).name();
        let written = records.zero(self.block, name, self.page * PAGE, &mut part.bytes);
        written.map_err(MigrationError::wire("live save"))
    }

    fn header(&self, records: &mut RamRecordWriter, part: &mut PagesPart<'_>) -> Result<(), MigrationError> {
        let name = self.ram.block(self.block).name();
        let written = records.page_header(self.block, name, self.page * PAGE, &mut part.bytes);
        written.map_err(MigrationError::wire("live save"))
    }
}
