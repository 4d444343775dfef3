//! Describes how a guest writes: the distinct bytes that it dirties in an interval.
//!
//! There are three descriptions, from coarse to fine. A *rate* is QEMU's assumption: the guest writes no page twice
//! before it has written all of RAM. A *curve* is a measurement: distinct bytes over intervals of several lengths. The
//! curve bends because a page that is written again counts once. A *working set* explains the bend by classes of
//! pages, each with its own write rate. In random order, n·(1 − e^(−r·T/n)) of n pages are dirty after T. In
//! sequential order, min(r·T, n) are.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::class::{Class, Order, PAGE_BYTES, Point, sane};
use super::fit;

/// A description of a guest's writes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DirtyModel {
    /// Bytes per second. No page is written twice before all of RAM was written.
    Rate(u64),
    /// Measured points, in any order.
    Curve(Vec<Point>),
    /// Classes of pages that have no page in common.
    WorkingSet(Vec<Class>),
}

impl DirtyModel {
    /// Bytes of distinct pages that a guest with `ram_bytes` of RAM writes in `over`.
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

    /// The same guest as classes of pages, which the simulation needs.
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
                // If the classes have more pages than the guest's RAM, all are reduced by the same factor.
                let claimed: f64 = classes.iter().map(|class| sane(class.pages)).sum();
                let part = if claimed > ram_pages { ram_pages / claimed } else { 1.0 };
                let share = |class: &Class| Class { pages: sane(class.pages) * part, ..*class };
                classes.iter().map(share).collect()
            }
        }
    }
}

/// Distinct bytes after `seconds`, by the upper concave hull of the measured points. The true curve of a constant
/// guest is concave, and measurements are more often too low than too high.
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

/// The corners of the upper concave hull of the points, which starts at (0, 0) and never falls.
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
            // Of two points with the same interval, keep the greater one, which is the later one.
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
