//! How a guest writes: how many distinct bytes it dirties in an interval.
//!
//! Three ways to say it, from coarse to fine. A *rate* is what QEMU reckons with: a guest that never writes the
//! same page twice until it has been through all of RAM. A *curve* is what can be measured: distinct bytes over
//! intervals of several lengths; it bends, since a page that is written again counts once. A *working set* is
//! what stands behind the bend: classes of pages, each written at its own rate, in random order (a page is hit
//! by chance, so n·(1 − e^(−r·T/n)) of n are dirty after T) or one after the other (min(r·T, n)).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{PAGE_BYTES, fit, seconds};

/// A description of a guest's writing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DirtyModel {
    /// Bytes per second, never the same page twice before all of RAM was written.
    Rate(u64),
    /// Measured points, in any order.
    Curve(Vec<Point>),
    /// Classes of pages that do not overlap.
    WorkingSet(Vec<Class>),
}

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

impl DirtyModel {
    /// How many bytes of pages are written at least once in `over`, by a guest with `ram_bytes` of RAM.
    pub fn distinct_bytes(&self, over: Duration, ram_bytes: u64) -> f64 {
        let bytes = match self {
            Self::Rate(rate) => *rate as f64 * over.as_secs_f64(),
            Self::Curve(points) => interpolate(points, over.as_secs_f64()),
            Self::WorkingSet(classes) => {
                classes.iter().map(|class| class.distinct(over.as_secs_f64())).sum::<f64>() * PAGE_BYTES
            }
        };
        bytes.clamp(0.0, ram_bytes as f64)
    }

    /// The same guest as classes of pages: what a simulation works with.
    pub fn classes(&self, ram_bytes: u64) -> Vec<Class> {
        let ram_pages = ram_bytes as f64 / PAGE_BYTES;
        match self {
            Self::Rate(rate) => {
                vec![Class {
                    pages: ram_pages,
                    writes_per_second: *rate as f64 / PAGE_BYTES,
                    order: Order::Sequential,
                }]
            }
            Self::Curve(points) => fit::fit(points, ram_bytes).classes,
            Self::WorkingSet(classes) => {
                // Classes that claim more than there is share what there is.
                let claimed: f64 = classes.iter().map(|class| sane(class.pages)).sum();
                let part = if claimed > ram_pages { ram_pages / claimed } else { 1.0 };
                let share = |class: &Class| Class { pages: sane(class.pages) * part, ..*class };
                classes.iter().map(share).collect()
            }
        }
    }
}

impl Class {
    /// Writes in `seconds`, to whatever pages.
    pub(super) fn written(&self, seconds: f64) -> f64 {
        sane(self.writes_per_second) * seconds.max(0.0)
    }

    /// Pages that are dirty after `seconds` without a look.
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
    /// that were looked at one after the other.
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

    /// Pages found dirty of this class, when a pass over `sent` of its pages is sent up to `part`. Those count only what was
    /// written after they were sent; those that are still to be sent do not count at all, since they are read later. The
    /// times, in seconds: since the sync before, since the last page that was sent, since the first.
    pub(super) fn after_pass(&self, sent: f64, part: f64, (synced, newest, oldest): (f64, f64, f64)) -> f64 {
        let all = self.distinct(synced);
        match self.order {
            Order::Random if self.pages > 0.0 => {
                let in_pass = (sent / self.pages).clamp(0.0, 1.0);
                in_pass * part * self.mean_distinct(newest, oldest) + (1.0 - in_pass) * all
            }
            // The writer is elsewhere than where it was during the pass before.
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
fn sane(amount: f64) -> f64 {
    if amount.is_finite() { amount.max(0.0) } else { 0.0 }
}

/// Distinct bytes after `seconds` by the measured points: along the concave line above them, since what is true of
/// a guest that does not change is concave, and above rather than below.
fn interpolate(points: &[Point], seconds: f64) -> f64 {
    let hull = concave(points);
    let mut before = (0.0, 0.0);
    let mut slope = 0.0;
    for (at, bytes) in hull {
        slope = (bytes - before.1) / (at - before.0);
        if seconds <= at {
            break;
        }
        before = (at, bytes);
    }
    before.1 + slope * (seconds - before.0).max(0.0)
}

/// The corners of the least concave, never falling line over the points that begins at nothing.
fn concave(points: &[Point]) -> Vec<(f64, f64)> {
    let mut sorted: Vec<(f64, f64)> = points
        .iter()
        .filter(|point| !point.interval.is_zero())
        .map(|point| (point.interval.as_secs_f64(), point.distinct_bytes as f64))
        .collect();
    sorted.sort_by(|one, other| one.partial_cmp(other).unwrap_or(std::cmp::Ordering::Equal));
    let mut hull: Vec<(f64, f64)> = vec![(0.0, 0.0)];
    for (at, bytes) in sorted {
        let bytes = bytes.max(hull[hull.len() - 1].1);
        if at <= hull[hull.len() - 1].0 {
            // Two of one length: the greater, which comes last.
            hull.pop();
        }
        while let [.., first, second] = hull[..] {
            let rises = (second.1 - first.1) * (at - second.0);
            if rises > (bytes - second.1) * (second.0 - first.0) {
                break;
            }
            hull.pop();
        }
        hull.push((at, bytes));
    }
    hull.remove(0);
    hull
}
