//! How a guest writes: how many distinct bytes it dirties in an interval.
//!
//! Three ways to say it, from coarse to fine. A *rate* is what QEMU estimates with: a guest that never writes the
//! same page twice until it has been through all of RAM. A *curve* is what can be measured: distinct bytes over
//! intervals of several lengths; it bends, since a page that is written again counts once. A *working set* is
//! what causes the bend: classes of pages, each written at its own rate, in random order (a page is hit
//! by chance, so n·(1 − e^(−r·T/n)) of n are dirty after T) or one after the other (min(r·T, n)).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::class::{Class, Order, PAGE_BYTES, Point, sane};
use super::fit;

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
