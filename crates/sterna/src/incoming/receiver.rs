//! What transports get of a migration.

use std::sync::atomic::Ordering;
use std::time::Duration;

use sterna_ram::GuestRam;

use super::carrier::Receiver;
use super::shared::Shared;
use crate::error::MigrationError;
use crate::events::Event;
use crate::pages::RamSink;

impl Receiver for Shared {
    fn stall_limit(&self) -> Duration {
        self.params.limits.stall
    }

    fn ram(&self) -> Result<&GuestRam, MigrationError> {
        Ok(&self.layout()?.ram)
    }

    fn ram_sink(&self) -> Option<&RamSink> {
        self.target.ram_sink()
    }

    fn count_zero_pages(&self, pages: u64) {
        self.zero_pages.fetch_add(pages, Ordering::Relaxed);
    }

    fn warn(&self, text: String) {
        self.tell(&Event::Warning(text));
    }
}
