//! The main channel in postcopy: the package, and the pages that arrive after the guest's switch.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sterna_proto::destination::Event as Fed;
use sterna_ram::PAGE_SIZE;
use sterna_transport::Channel;
use sterna_wire::main::{Command, Step};

use super::{CHANNEL, Loader, read_to_the_end};
use crate::error::{BadPackage, Difference, Ending, MigrationError, Untimely, UntimelyCommand};
use crate::incoming::arriving::KeptReading;
use crate::incoming::postcopy;
use crate::incoming::reader::Reader;
use crate::incoming::shared::Shared;

/// Bytes that a package may contain besides the devices' bodies: commands and section headers.
const PACKAGE_SLACK: u64 = 1 << 20;

/// Continues the stream on another channel after the first was lost in postcopy.
pub(in crate::incoming) fn recover(shared: &Arc<Shared>, channel: &Arc<Channel>) {
    let Some(KeptReading { mut decoder, keeps_alive }) = shared.postcopy.take_reading() else {
        let what = "what was read of the lost connection is not known any more";
        return shared.fail(MigrationError::Internal(what.to_owned()));
    };
    decoder.begin_recovery();
    let mut loader = Loader::with(shared, Reader::new(Arc::clone(channel)), decoder);
    loader.keeps_alive = keeps_alive;
    read_to_the_end(loader);
}

impl Loader<'_> {
    /// Keeps the reader's state for another main channel, if the guest runs while pages are missing.
    pub(super) fn keep_reading(self) {
        let Loader { shared, decoder, keeps_alive, .. } = self;
        if shared.postcopy.arriving().is_some() {
            shared.postcopy.keep_reading(KeptReading { decoder, keeps_alive });
        }
    }

    pub(super) fn postcopy_command(&mut self, command: Command) -> Result<(), MigrationError> {
        match command {
            Command::PostcopyAdvise(Some((host, target))) => postcopy::advised(self.shared, host, target),
            Command::PostcopyDiscard { block, ranges } => {
                let Some(index) = self.block_index(&block) else {
                    return Err(Untimely::UnknownBlock { command: UntimelyCommand::Discard, block }.into());
                };
                postcopy::discard(self.shared, index, &block, &ranges)
            }
            Command::Packaged(bytes) => self.package(bytes as usize),
            Command::ReceivedBitmap(block) => {
                postcopy::recovery::say_received(self.shared, self.block_index(&block), &block)
            }
            Command::PostcopyResume => postcopy::recovery::resume(self.shared),
            // A Sterna has requested *prepare* before, and the package is loaded.
            Command::PostcopyRun => {
                self.shared.postcopy.commands.lock().runs()?;
                self.shared.report(Fed::RunRead);
                Ok(())
            }
            other => Err(Difference::Command(Box::new(other)).into()),
        }
    }

    /// Reads a whole package, and hands it to the thread that loads it. Meanwhile pages can arrive.
    fn package(&mut self, bytes: usize) -> Result<(), MigrationError> {
        self.shared.postcopy.commands.lock().packaged()?;
        let most = self.shared.expectations().device_state_bytes.saturating_add(PACKAGE_SLACK);
        if bytes as u64 > most {
            return Err(BadPackage::TooLong { bytes, most }.into());
        }
        if !self.reader.fill(bytes)? {
            return Err(Ending::InsidePackage { offset: self.decoder.position() }.into());
        }
        let (mut items, mut left) = (Vec::new(), bytes);
        while left > 0 {
            let step =
                self.decoder.next(&self.reader.bytes()[..left]).map_err(MigrationError::wire(CHANNEL))?;
            let consumed = match step {
                Step::Partial { consumed } => consumed,
                Step::Item { item, consumed } => {
                    items.push(item);
                    consumed
                }
                Step::NeedMore(_) | Step::End => {
                    return Err(BadPackage::Torn.into());
                }
            };
            self.consume(consumed);
            left -= consumed;
        }
        postcopy::take_package(self.shared, items)
    }

    /// Reads a page that arrives while the guest runs.
    pub(super) fn following_page(&mut self, block: usize, offset: u64) -> Result<(), MigrationError> {
        if !self.reader.fill(PAGE_SIZE)? {
            return Err(Ending::InsidePage { offset: self.decoder.position() }.into());
        }
        let shared = self.shared;
        let content = &self.reader.bytes()[..PAGE_SIZE];
        if let Some(arriving) = shared.postcopy.arriving() {
            arriving.page(block, offset / PAGE_SIZE as u64, content)?;
        }
        self.consume(PAGE_SIZE);
        self.decoder.payload_consumed();
        shared.normal_pages.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn following_zero(&self, block: usize, offset: u64) -> Result<(), MigrationError> {
        if let Some(arriving) = self.shared.postcopy.arriving() {
            arriving.zero(block, offset / PAGE_SIZE as u64)?;
        }
        self.shared.zero_pages.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}
