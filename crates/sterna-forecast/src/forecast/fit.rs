//! Fits classes of pages to a measured curve.
//!
//! The candidates are tried from simple to complex. They are a steady rate over all of RAM, a sequential walk through
//! part of it, one random class, and a hot and a cold random class. Each is fitted by least squares of relative
//! errors, over a grid of time constants (the time until a class is mostly dirty). A more complex candidate is only
//! chosen if it is clearly better, because many meaningless sets of classes fit a few points exactly.

use super::class::{Class, Order, PAGE_BYTES, Point};

/// The fitted classes and their error.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Fit {
    /// The fitted classes.
    pub classes: Vec<Class>,
    /// Root of the mean squared relative error.
    pub error: f64,
}

/// Minimum improvement of the error for a more complex candidate. An error below this value is good enough.
const CLEARLY: f64 = 0.02;
/// Number of time constants tried, from a tenth of the shortest interval to fifty times the longest.
const STEPS: i32 = 48;

/// Fits classes to `points`. Without points, or if no page was written, there are no classes.
pub fn fit(points: &[Point], ram_bytes: u64) -> Fit {
    let ram_pages = ram_bytes as f64 / PAGE_BYTES;
    let samples = samples(points);
    let nothing = Fit { classes: Vec::new(), error: 0.0 };
    let (Some(shortest), Some(longest)) =
        (samples.iter().map(|it| it.0).reduce(f64::min), samples.iter().map(|it| it.0).reduce(f64::max))
    else {
        return nothing;
    };
    if samples.iter().all(|(_, pages)| *pages == 0.0) {
        return nothing;
    }
    let mut best = steady(&samples, ram_pages);
    let richer: [&dyn Fn() -> Option<Fit>; 3] =
        [&|| walk(&samples, ram_pages), &|| random(&samples, ram_pages, &grid(shortest, longest)), &|| {
            hot_and_cold(&samples, ram_pages, &grid(shortest, longest))
        }];
    for candidate in richer {
        if best.error <= CLEARLY {
            break;
        }
        if let Some(fit) = candidate().filter(|fit| fit.error + CLEARLY / 2.0 < best.error) {
            best = fit;
        }
    }
    best
}

/// (seconds, pages) of each point.
fn samples(points: &[Point]) -> Vec<(f64, f64)> {
    points
        .iter()
        .filter(|point| !point.interval.is_zero())
        .map(|point| (point.interval.as_secs_f64(), point.distinct_bytes as f64 / PAGE_BYTES))
        .collect()
}

fn grid(shortest: f64, longest: f64) -> Vec<f64> {
    let (from, to) = (shortest / 10.0, longest * 50.0);
    (0..STEPS).map(|step| from * (to / from).powf(f64::from(step) / f64::from(STEPS - 1))).collect()
}

fn steady(samples: &[(f64, f64)], ram_pages: f64) -> Fit {
    let rate = one_factor(samples, |seconds| seconds);
    finish(samples, vec![Class { pages: ram_pages, writes_per_second: rate, order: Order::Sequential }])
}

/// Fits a sequential walk through the maximum of the dirty pages.
fn walk(samples: &[(f64, f64)], ram_pages: f64) -> Option<Fit> {
    let pages = samples.iter().map(|it| it.1).reduce(f64::max)?.min(ram_pages);
    // Points at the maximum do not depend on the rate.
    let rising: Vec<_> = samples.iter().copied().filter(|it| it.1 < pages * (1.0 - CLEARLY)).collect();
    if rising.is_empty() {
        return None;
    }
    let rate = one_factor(&rising, |seconds| seconds);
    Some(finish(samples, vec![Class { pages, writes_per_second: rate, order: Order::Sequential }]))
}

fn random(samples: &[(f64, f64)], ram_pages: f64, grid: &[f64]) -> Option<Fit> {
    let fits = grid.iter().map(|constant| {
        let pages = one_factor(samples, |seconds| dirty_part(seconds, *constant)).min(ram_pages);
        finish(samples, vec![class(pages, *constant)])
    });
    fits.min_by(|one, other| one.error.total_cmp(&other.error))
}

fn hot_and_cold(samples: &[(f64, f64)], ram_pages: f64, grid: &[f64]) -> Option<Fit> {
    let mut best: Option<Fit> = None;
    for (at, hot) in grid.iter().enumerate() {
        for cold in &grid[at + 1..] {
            let Some((hot_pages, cold_pages)) = two_factors(samples, *hot, *cold) else { continue };
            if hot_pages > ram_pages {
                continue;
            }
            let cold_pages = cold_pages.min(ram_pages - hot_pages);
            let fit = finish(samples, vec![class(hot_pages, *hot), class(cold_pages, *cold)]);
            if best.as_ref().is_none_or(|best| fit.error < best.error) {
                best = Some(fit);
            }
        }
    }
    best
}

/// A random class of which 1 − 1/e is dirty after `constant` seconds.
fn class(pages: f64, constant: f64) -> Class {
    Class { pages, writes_per_second: pages / constant, order: Order::Random }
}

fn dirty_part(seconds: f64, constant: f64) -> f64 {
    -(-seconds / constant).exp_m1()
}

/// The factor for `shape` with the least sum of squared relative errors.
fn one_factor(samples: &[(f64, f64)], shape: impl Fn(f64) -> f64) -> f64 {
    let (mut of_shape, mut of_both) = (0.0, 0.0);
    for (seconds, pages) in samples {
        let relative = shape(*seconds) / pages.max(1.0);
        of_shape += relative * relative;
        of_both += relative * (pages / pages.max(1.0));
    }
    if of_shape > 0.0 { of_both / of_shape } else { 0.0 }
}

/// The factors for two shapes. None if one would be negative, or if the shapes are too similar.
fn two_factors(samples: &[(f64, f64)], hot: f64, cold: f64) -> Option<(f64, f64)> {
    let (mut aa, mut ab, mut bb, mut ay, mut by) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (seconds, pages) in samples {
        let weight = 1.0 / pages.max(1.0);
        let (a, b, y) =
            (dirty_part(*seconds, hot) * weight, dirty_part(*seconds, cold) * weight, pages * weight);
        aa += a * a;
        ab += a * b;
        bb += b * b;
        ay += a * y;
        by += b * y;
    }
    let determinant = aa * bb - ab * ab;
    if determinant <= aa * bb * 1e-9 {
        return None;
    }
    let (hot, cold) = ((ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant);
    (hot > 0.0 && cold > 0.0).then_some((hot, cold))
}

fn finish(samples: &[(f64, f64)], classes: Vec<Class>) -> Fit {
    let squares: f64 = samples
        .iter()
        .map(|(seconds, pages)| {
            let said: f64 = classes.iter().map(|class| class.distinct(*seconds)).sum();
            ((said - pages) / pages.max(1.0)).powi(2)
        })
        .sum();
    Fit { classes, error: (squares / samples.len().max(1) as f64).sqrt() }
}
