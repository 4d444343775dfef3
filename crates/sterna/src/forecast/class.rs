//! Pages that are written alike, and points of a measured curve.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::seconds;
use crate::ram::PAGE_SIZE;

/// Bytes of a page, as a factor.
pub(crate) const PAGE_BYTES: f64 = PAGE_SIZE as f64;

/// A measured point of a curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// How long was waited; seconds in JSON.
    #[serde(with = "seconds")]
    pub interval: Duration,
    /// How many bytes of pages were written at least once meanwhile.
    pub distinct_bytes: u64,
}

/// Pages that are written alike.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Class {
    /// How many; a fraction of one counts where it was fitted.
    pub pages: f64,
    /// Pages written per second, over the whole class.
    pub writes_per_second: f64,
    /// In which order.
    pub order: Order,
}

/// In which order a class's pages are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Each time another one by chance.
    Random,
    /// One after the other, again and again.
    Sequential,
}

impl Class {
    /// Writes in `seconds`, to whatever pages.
    pub(super) fn written(&self, seconds: f64) -> f64 {
        sane(self.writes_per_second) * seconds.max(0.0)
    }

    /// Pages that are dirty `seconds` after a sync.
    pub fn distinct(&self, seconds: f64) -> f64 {
        let (pages, rate) = (sane(self.pages), sane(self.writes_per_second));
        if pages == 0.0 || seconds <= 0.0 {
            return 0.0;
        }
        match self.order {
            Order::Random => -pages * (-rate * seconds / pages).exp_m1(),
            Order::Sequential => (rate * seconds).min(pages),
        }
    }

    /// The mean of [`Class::distinct`] over intervals between two lengths, evenly spread: what is found of pages
    /// that were synced one after the other.
    pub fn mean_distinct(&self, shortest: f64, longest: f64) -> f64 {
        let (shortest, longest) = (shortest.max(0.0), longest.max(0.0));
        let spread = longest - shortest;
        // Where the two ends hardly differ, the difference of two integrals is mostly rounding.
        if spread <= longest * 1e-6 {
            return self.distinct(longest);
        }
        let mean = (self.integral(longest) - self.integral(shortest)) / spread;
        mean.clamp(self.distinct(shortest), self.distinct(longest))
    }

    /// Pages found dirty of this class, when a round over `sent` of its pages is sent up to `part`. Those count only what was
    /// written after they were sent; those that are still to be sent do not count at all, since they are read later. The
    /// times, in seconds: since the sync before, since the last page that was sent, since the first.
    pub(super) fn after_round(&self, sent: f64, part: f64, (synced, newest, oldest): (f64, f64, f64)) -> f64 {
        let all = self.distinct(synced);
        match self.order {
            Order::Random if self.pages > 0.0 => {
                let in_round = (sent / self.pages).clamp(0.0, 1.0);
                in_round * part * self.mean_distinct(newest, oldest) + (1.0 - in_round) * all
            }
            // The writer is elsewhere than where it was during the round before.
            Order::Random | Order::Sequential => all,
        }
    }

    /// The same class written at `factor` times its rate.
    pub(super) fn scaled(&self, factor: f64) -> Self {
        Self { writes_per_second: sane(self.writes_per_second) * factor, ..*self }
    }

    fn integral(&self, seconds: f64) -> f64 {
        let (pages, rate) = (sane(self.pages), sane(self.writes_per_second));
        if pages == 0.0 || rate == 0.0 {
            return 0.0;
        }
        let through = pages / rate;
        match self.order {
            Order::Random => pages * (seconds + through * (-seconds / through).exp_m1()),
            Order::Sequential if seconds <= through => rate * seconds * seconds / 2.0,
            Order::Sequential => pages * (seconds - through / 2.0),
        }
    }
}

/// What is no amount counts as nothing.
pub(super) fn sane(amount: f64) -> f64 {
    if amount.is_finite() { amount.max(0.0) } else { 0.0 }
}
