//! Sends pages of a guest that is stopped here, from its memory without a copy.

use std::sync::Arc;

use sterna_ram::{GuestRam, PAGE_SIZE};
use sterna_transport::Channel;
use sterna_wire::ram::RamRecordWriter;

use super::shared::SharedPostcopy;
use crate::error::MigrationError;
use crate::order::PageRun;
use crate::outgoing::main_channel::MainChannel;
use crate::outgoing::main_stream::PagesPart;
use crate::outgoing::measure::Counters;

/// The most background bytes in the kernel before a requested page on the same channel.
const QUEUED_BYTES: u64 = 512 << 10;

/// The channels for pages in postcopy.
#[derive(Clone)]
pub(in crate::outgoing) struct PageSender {
    ram: GuestRam,
    main: Arc<MainChannel>,
    /// The channel of requested pages, if the destination has one.
    preempt: Option<Arc<Channel>>,
    counters: Arc<Counters>,
}

impl PageSender {
    pub(in crate::outgoing) fn new(
        ram: GuestRam,
        counters: Arc<Counters>,
        main: &Arc<MainChannel>,
        preempt: Option<Arc<Channel>>,
    ) -> Self {
        Self { ram, main: Arc::clone(main), preempt, counters }
    }

    /// Whether requested pages use the same channel as background pages.
    pub(in crate::outgoing) fn is_alone(&self) -> bool {
        self.preempt.is_none()
    }

    /// Whether so many bytes wait on the main channel that requested pages are late.
    pub(in crate::outgoing) fn is_full(&self) -> bool {
        self.main.channel.as_ref().is_some_and(|channel| channel.unsent_bytes() > QUEUED_BYTES)
    }

    /// Sends background pages. Gives the number of bytes.
    pub(in crate::outgoing) fn send(&self, run: PageRun) -> Result<u64, MigrationError> {
        let (normal, zero, bytes) = self.counters.moving(|| {
            self.main.with(|stream| {
                let mut counts = (0, 0);
                let bytes = stream.ram_pages(|records, part| {
                    counts = put(&self.ram, run, records, part)?;
                    Ok(())
                })?;
                Ok((counts.0, counts.1, bytes))
            })
        })?;
        self.counters.pages(normal, zero);
        Ok(bytes)
    }

    /// Sends requested pages. Gives the number of bytes.
    pub(in crate::outgoing) fn send_requested(&self, run: PageRun) -> Result<u64, MigrationError> {
        let Some(channel) = &self.preempt else { return self.send(run) };
        // The first record of each write names its block.
        let (mut records, mut part) = (RamRecordWriter::new(), PagesPart::default());
        let (normal, zero) = put(&self.ram, run, &mut records, &mut part)?;
        let (parts, length) = part.parts();
        channel.write_parts(&parts)?;
        self.counters.main(length as u64);
        self.counters.pages(normal, zero);
        Ok(length as u64)
    }

    /// Sends requested pages until the connection ends.
    pub(in crate::outgoing) fn answer(&self, postcopy: &SharedPostcopy) -> Result<(), MigrationError> {
        while let Some(run) = postcopy.next_requested() {
            let sent = self.send_requested(run);
            // The answer is counted before EOF may follow, so that the statistics include the last one.
            if let Ok(bytes) = sent {
                postcopy.has_answered(!self.is_alone(), run.count, bytes);
            }
            postcopy.has_sent_requested();
            sent?;
        }
        Ok(())
    }

    /// Closes the channel of requested pages, after the last page.
    pub(in crate::outgoing) fn close_preempt(&self) {
        if let Some(channel) = &self.preempt
            && let Err(error) = channel.finish_writing()
        {
            // The destination has no open requests, so the error has no effect.
            tracing::debug!(%error, "end of the preempt channel");
        }
    }
}

/// Appends the records of `run`: pages with content, and zero pages.
fn put<'a>(
    ram: &'a GuestRam,
    run: PageRun,
    records: &mut RamRecordWriter,
    part: &mut PagesPart<'a>,
) -> Result<(u64, u64), MigrationError> {
    let block = ram.block(run.block);
    let (mut normal, mut zero) = (0, 0);
    for page in run.first..run.end() {
        let (content, offset) = (block.page(page)?, page * PAGE_SIZE as u64);
        let wire = MigrationError::wire("RAM");
        if content.is_zero()? {
            records.zero(run.block, block.name(), offset, &mut part.bytes).map_err(wire)?;
            zero += 1;
        } else {
            records.page_header(run.block, block.name(), offset, &mut part.bytes).map_err(wire)?;
            part.page(content);
            normal += 1;
        }
    }
    Ok((normal, zero))
}
