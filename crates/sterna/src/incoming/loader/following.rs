//! The main channel in postcopy: the package, and the pages that arrive after the guest's switch.

use std::sync::atomic::Ordering;

use sterna_ram::PAGE_SIZE;
use sterna_wire::main::Step;

use super::{CHANNEL, Loader};
use crate::error::{BadPackage, Ending, MigrationError};
use crate::incoming::postcopy;

/// Bytes that a package may contain besides the devices' bodies: commands and section headers.
const PACKAGE_SLACK: u64 = 1 << 20;

impl Loader<'_> {
    /// Reads a whole package, and hands it to the thread that loads it. Meanwhile pages can arrive.
    pub(super) fn package(&mut self, bytes: usize) -> Result<(), MigrationError> {
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
