//! Classes of pages with the same write pattern, and the points of a measured curve.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::seconds;
use sterna_wire::PAGE_SIZE;

/// Bytes of a page, as a floating-point factor.
pub(crate) const PAGE_BYTES: f64 = PAGE_SIZE as f64;

/// A measured point of a guest's curve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Point {
    /// Length of the interval, in seconds in JSON.
    #[serde(with = "seconds")]
    pub interval: Duration,
    /// Bytes of pages that were written at least once in the interval.
    pub distinct_bytes: u64,
}

/// Pages with the same write rate and order.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Class {
    /// Number of pages. It is a fraction if the class was fitted to a curve.
    pub pages: f64,
    /// Page writes per second, in total for the class.
    pub writes_per_second: f64,
    /// Order of the writes.
    pub order: Order,
}

/// The order in which the pages of a class are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Each write hits a random page.
    Random,
    /// Pages are written one after the other, again and again.
    Sequential,
}

impl Class {
    /// Number of page writes in `seconds`. Repeated writes to a page count each time.
    pub(super) fn written(&self, seconds: f64) -> f64 {
        sane(self.writes_per_second) * seconds.max(0.0)
    }

    /// Number of pages that are dirty `seconds` after a sync.
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

    /// The mean of [`Class::distinct`] over intervals that are evenly distributed between two lengths, in seconds. It
    /// is the number of dirty pages among pages that were synced one after the other.
    pub fn mean_distinct(&self, shortest: f64, longest: f64) -> f64 {
        let (shortest, longest) = (shortest.max(0.0), longest.max(0.0));
        let spread = longest - shortest;
        // If the two lengths are almost equal, the difference of the integrals is mostly a rounding error.
        if spread <= longest * 1e-6 {
            return self.distinct(longest);
        }
        let mean = (self.integral(longest) - self.integral(shortest)) / spread;
        mean.clamp(self.distinct(shortest), self.distinct(longest))
    }

    /// Number of dirty pages of this class when a round over `sent` is sent up to `part`. `sent` counts pages of this
    /// class. Pages that were sent count only if they were written afterwards. Pages that are still to be sent do not
    /// count, because they are read later. The times, in seconds: since the previous sync, since the last sent page,
    /// since the first sent page.
    pub(super) fn after_round(&self, sent: f64, part: f64, (synced, newest, oldest): (f64, f64, f64)) -> f64 {
        let all = self.distinct(synced);
        match self.order {
            Order::Random if self.pages > 0.0 => {
                let in_round = (sent / self.pages).clamp(0.0, 1.0);
                in_round * part * self.mean_distinct(newest, oldest) + (1.0 - in_round) * all
            }
            // A sequential writer is at another place than during the previous round.
            Order::Random | Order::Sequential => all,
        }
    }

    /// The same class with `factor` times its write rate.
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

/// Replaces negative, infinite and NaN amounts by 0.
pub(super) fn sane(amount: f64) -> f64 {
    if amount.is_finite() { amount.max(0.0) } else { 0.0 }
}
