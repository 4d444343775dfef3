//! The only lane without multifd: pages are records of the main channel (specs/stream.md §2.3).

use std::sync::Arc;

use parking_lot::Mutex;
use sterna_ram::{GuestRam, PAGE_SIZE, RamSlice};
use sterna_wire::extension::ROUND_PING;
use sterna_wire::main::Command;

use super::super::guest_source::PageReader;
use super::super::main_stream::MainStream;
use super::super::main_stream::PagesPart;
use super::super::measure::Counters;
use super::super::protection::{Coded, DeltaCache, PageSums, Scratch, SentPages};
use super::limiter::Limiter;
use crate::error::MigrationError;
use crate::order::PageRun;
use crate::pages::PageWriter;

/// Writes pages to the main channel, each run as a separate PART.
pub(in crate::outgoing) struct MainLane {
    pub main: Arc<Mutex<MainStream>>,
    pub reader: Arc<dyn PageReader>,
    pub ram: GuestRam,
    pub counters: Arc<Counters>,
    pub limiter: Arc<Limiter>,
    /// `Some` if checkpoints send differences.
    pub deltas: Option<(DeltaCache, Scratch)>,
    /// The sums of the pages of checkpoints.
    pub sent: Option<Arc<SentPages>>,
    /// The lane marks the end of each round for the destination.
    pub marks: bool,
    /// The opening barrier, which ends no round, was written.
    pub has_begun: bool,
    /// Shuts the channel down.
    pub abort: Box<dyn Fn() + Send>,
}

impl PageWriter for MainLane {
    fn write_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        if self.deltas.is_some() {
            let number = self.main.lock().checkpoint();
            if let Some(number) = number {
                return self.write_changes(number, run);
            }
        }
        self.counters.throttled(self.limiter.take(run.count * (PAGE_SIZE as u64 + 8)));
        let block = self.ram.block(run.block);
        let content = self.reader.content(run)?;
        let (is_copy, mut sums) = (self.reader.is_copy(), self.sums());
        let sent = self.counters.moving(|| {
            self.main.lock().ram_pages(|records, part| {
                for page in run.first..run.end() {
                    let offset = page * PAGE_SIZE as u64;
                    records
                        .page_header(run.block, block.name(), offset, &mut part.bytes)
                        .map_err(MigrationError::wire("main channel"))?;
                    let at = (page - run.first) as usize * PAGE_SIZE;
                    let Some(content) = content.part(at, PAGE_SIZE) else {
                        return Err(MigrationError::Internal(format!("{run:?} came without its last pages")));
                    };
                    put((run.block, page), content, is_copy, &mut sums, part)?;
                }
                Ok(())
            })
        });
        sent?;
        self.has_sent(sums);
        self.counters.pages(run.count, 0);
        Ok(())
    }

    fn zero_run(&mut self, run: PageRun) -> Result<(), MigrationError> {
        self.counters.throttled(self.limiter.take(run.count * 9));
        let name = self.ram.block(run.block).name();
        let (main, deltas) = (&self.main, &self.deltas);
        self.counters.moving(|| {
            let mut main = main.lock();
            if let (Some((deltas, _)), Some(number)) = (deltas, main.checkpoint()) {
                deltas.zero(number, run);
            }
            main.ram_records(|records, out| {
                (run.first..run.end())
                    .try_for_each(|page| records.zero(run.block, name, page * PAGE_SIZE as u64, out))
            })
        })?;
        let mut sums = self.sums();
        if let Some(sums) = &mut sums {
            sums.zeros(run.block, run.first, run.count);
        }
        self.has_sent(sums);
        self.counters.pages(0, run.count);
        Ok(())
    }

    /// Separates rounds. One channel keeps the order of pages by itself, so at most a mark is written.
    fn barrier(&mut self) -> Result<(), MigrationError> {
        if std::mem::replace(&mut self.has_begun, true) && self.marks {
            self.main.lock().commands(&[Command::Ping(ROUND_PING)])?;
        }
        Ok(())
    }

    fn abort(&mut self) {
        (self.abort)();
    }
}

impl MainLane {
    /// Sends pages of checkpoint `number`, as differences where they are shorter.
    fn write_changes(&mut self, number: u64, run: PageRun) -> Result<(), MigrationError> {
        let block = self.ram.block(run.block);
        let content = self.reader.content(run)?;
        let (is_copy, mut sums) = (self.reader.is_copy(), self.sums());
        let Some((deltas, scratch)) = &mut self.deltas else {
            return Err(MigrationError::Internal("differences without a cache".to_owned()));
        };
        let wrong = MigrationError::wire("main channel");
        let mut sent = 0;
        self.counters.encoding(|| {
            self.main.lock().ram_pages(|records, part| {
                for page in run.first..run.end() {
                    let offset = page * PAGE_SIZE as u64;
                    let at = (page - run.first) as usize * PAGE_SIZE;
                    let Some(content) = content.part(at, PAGE_SIZE) else {
                        return Err(MigrationError::Internal(format!("{run:?} came without its last pages")));
                    };
                    let coded = deltas.send(number, (run.block, page), &content, scratch)?;
                    sent += u64::from(coded != Coded::Same);
                    if let (Some(sums), Coded::Delta(_, bytes) | Coded::Whole(bytes)) = (&mut sums, &coded) {
                        sums.page(run.block, page, *bytes);
                    }
                    match coded {
                        Coded::Same => {}
                        Coded::Delta(delta, _) => records
                            .xbzrle(run.block, block.name(), offset, delta, &mut part.bytes)
                            .map_err(&wrong)?,
                        Coded::Whole(bytes) => {
                            records
                                .page_header(run.block, block.name(), offset, &mut part.bytes)
                                .map_err(&wrong)?;
                            part.bytes.extend_from_slice(bytes);
                        }
                        Coded::Uncached => {
                            records
                                .page_header(run.block, block.name(), offset, &mut part.bytes)
                                .map_err(&wrong)?;
                            put((run.block, page), content, is_copy, &mut sums, part)?;
                        }
                    }
                }
                Ok(())
            })
        })?;
        self.has_sent(sums);
        self.counters.pages(sent, 0);
        Ok(())
    }

    /// Empty sums for a run; `None` in the seeding.
    fn sums(&self) -> Option<PageSums> {
        self.sent.as_ref().filter(|sent| sent.is_counting()).map(|_| PageSums::default())
    }

    fn has_sent(&self, sums: Option<PageSums>) {
        if let Some((sent, sums)) = self.sent.as_ref().zip(sums) {
            sent.add(&sums);
        }
    }
}

/// Appends a whole page after its header.
///
/// The sums cover the bytes that are sent, even if the guest changes the memory meanwhile.
fn put<'a>(
    (block, page): (usize, u64),
    content: RamSlice<'a>,
    is_copy: bool,
    sums: &mut Option<PageSums>,
    part: &mut PagesPart<'a>,
) -> Result<(), MigrationError> {
    let Some(sums) = sums else {
        part.page(content);
        return Ok(());
    };
    let mut bytes = [0; PAGE_SIZE];
    content.copy_to(&mut bytes)?;
    sums.page(block, page, &bytes);
    if is_copy {
        part.page(content);
    } else {
        part.bytes.extend_from_slice(&bytes);
    }
    Ok(())
}
