//! Work before a checkpoint's pause: re-arms and copies most of its dirty pages.
//!
//! The pause then copies only the pages that were written since. So its length depends on the guest's last
//! writes, not on the whole epoch. If a guest writes the same pages again all the time, copying ahead gains
//! nothing. Then the pages are copied in the pause only, and copying ahead is tried again later.

use std::time::{Duration, Instant};

use super::checkpointing::Checkpointing;
use crate::error::MigrationError;
use crate::interruption::Break;

/// Fewer pages are copied in the pause, because that takes less than a millisecond.
const LEAST_PAGES: u64 = 512;
/// The consecutive checkpoints without copying ahead, after one whose pages were mostly written again.
const SKIPPED: u32 = 16;

/// Decides whether copying ahead pays off, and measures its duration.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// The number of pages that were copied for the next checkpoint.
    copied: u64,
    /// The time before a checkpoint is due at which copying ahead begins.
    lead: Duration,
    skip: u32,
}

impl Ahead {
    /// How long before a checkpoint is due copying ahead begins.
    ///
    /// `last_pages`: the pages of the last checkpoint.
    pub(super) fn lead(&self, last_pages: u64) -> Duration {
        if self.pays(last_pages) { self.lead } else { Duration::ZERO }
    }

    fn pays(&self, last_pages: u64) -> bool {
        self.skip == 0 && last_pages >= LEAST_PAGES
    }

    fn has_copied(&mut self, pages: u64, took: Duration) {
        self.copied = pages;
        self.lead = (self.lead * 3 + took) / 4;
    }

    /// Records a checkpoint that copied or protected `pages` in its pause.
    pub(super) fn paused(&mut self, pages: u64) {
        let copied = std::mem::take(&mut self.copied);
        self.skip = match copied {
            0 => self.skip.saturating_sub(1),
            _ if pages > copied / 2 => SKIPPED,
            _ => 0,
        };
    }
}

impl Checkpointing<'_> {
    /// Re-arms and copies the pages that are dirty now, if that pays off.
    pub(super) fn copy_ahead(&mut self, ahead: &mut Ahead) -> Result<(), Break> {
        let protecting = self.protecting;
        if !ahead.pays(protecting.counts.lock().last_pages) {
            return Ok(());
        }
        let began = Instant::now();
        MigrationError::check_memory(&self.transfer.shared.guest.ram)?;
        self.transfer.sync()?;
        let pages = self.transfer.rounds()?.rearm_ahead()?;
        let count = pages.count();
        match protecting.staging.stage_ahead(pages)? {
            true => ahead.has_copied(count, began.elapsed()),
            false => self.drop_ahead()?,
        }
        Ok(())
    }

    /// Discards the pages that were copied ahead: the pause copies all pages, or none.
    pub(super) fn drop_ahead(&mut self) -> Result<(), MigrationError> {
        let protecting = self.protecting;
        protecting.staging.drop_ahead();
        self.transfer.rounds()?.forget_ahead();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANY: u64 = 10_000;

    #[test]
    fn pages_are_copied_ahead_where_few_of_them_are_written_again() {
        let mut ahead = Ahead::default();
        assert!(!ahead.pays(LEAST_PAGES - 1));
        for _ in 0..30 {
            assert!(ahead.pays(MANY));
            ahead.has_copied(MANY, Duration::from_millis(8));
            ahead.paused(MANY / 10);
        }
        let lead = ahead.lead(MANY);
        assert!(lead > Duration::from_millis(7) && lead <= Duration::from_millis(8), "{lead:?}");
        assert_eq!(ahead.lead(LEAST_PAGES - 1), Duration::ZERO);
    }

    #[test]
    fn where_most_are_written_again_it_is_tried_seldom() {
        let mut ahead = Ahead::default();
        let mut tries = 0;
        for _ in 0..170 {
            if ahead.pays(MANY) {
                tries += 1;
                ahead.has_copied(MANY, Duration::from_millis(8));
            }
            ahead.paused(MANY * 3 / 4);
        }
        assert_eq!(tries, 10);
        ahead.has_copied(MANY, Duration::from_millis(8));
        ahead.paused(MANY);
        assert_eq!(ahead.lead(MANY), Duration::ZERO);
    }
}
