//! Whether the remaining pages fit the downtime limit: the one rule by which the engine stops a guest. Forecasts and
//! verdicts use it too (specs/convergence.md §2.3).

/// By which part, at least, the engine expects the remaining pages to take longer than lanes usually need.
pub const MARGIN: f64 = 0.15;
/// What stopping, saving, loading and starting a guest with small devices takes, if nothing better is known.
pub const FIXED_DOWNTIME: std::time::Duration = std::time::Duration::from_millis(4);
/// The part of the limit that sync and remaining pages may always use: no round makes the fixed costs shorter, and they
/// must not keep a guest from ever being handed over.
const LEAST_SHARE: f64 = 0.25;

/// How long the guest would stand still if it were stopped now; times in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DowntimeEstimate {
    /// The fixed costs: stop, devices, start.
    pub fixed: f64,
    /// The last sync.
    pub sync: f64,
    /// Sending the pages that remain then, after what sockets still hold.
    pub remaining: f64,
    /// By which part sync and remaining pages may well take longer.
    pub margin: f64,
}

impl DowntimeEstimate {
    /// How long it is expected to be.
    pub fn expected(self) -> f64 {
        self.fixed + self.sync + self.remaining
    }

    /// How long it may well be.
    pub fn longest(self) -> f64 {
        self.fixed + self.with_margin()
    }

    /// Whether the guest may be stopped under this limit.
    pub fn fits(self, limit: f64) -> bool {
        self.with_margin() <= allowed(limit, self.fixed)
    }

    /// The least limit that it fits.
    pub fn least_limit(self) -> f64 {
        self.longest().min(self.with_margin() / LEAST_SHARE)
    }

    fn with_margin(self) -> f64 {
        (self.sync + self.remaining) * (1.0 + self.margin)
    }
}

/// What sync and remaining pages may take under a limit, with their margin.
pub fn allowed(limit: f64, fixed: f64) -> f64 {
    (limit - fixed).max(limit * LEAST_SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ESTIMATE: DowntimeEstimate =
        DowntimeEstimate { fixed: 0.02, sync: 0.01, remaining: 0.03, margin: 0.5 };

    #[test]
    fn downtime_fits_from_its_least_limit_on() {
        let dear = DowntimeEstimate { fixed: 1.0, ..ESTIMATE };
        for (estimate, least) in [(ESTIMATE, 0.08), (dear, 0.24)] {
            assert!((estimate.least_limit() - least).abs() < 1e-9, "{estimate:?}");
            assert!(estimate.fits(least + 1e-9) && !estimate.fits(least - 1e-3), "{estimate:?}");
        }
    }

    #[test]
    fn downtime_has_all_its_parts_and_the_margin_only_for_sync_and_remaining_pages() {
        assert!((ESTIMATE.expected() - 0.06).abs() < 1e-9);
        assert!((ESTIMATE.longest() - 0.08).abs() < 1e-9);
    }
}
