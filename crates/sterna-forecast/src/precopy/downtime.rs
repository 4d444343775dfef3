//! Decides whether the remaining pages fit the downtime limit. The engine stops a guest only by this rule. Forecasts
//! and verdicts use it, too (specs/convergence.md §2.3).

/// Minimum safety margin, relative to the time that lanes usually need for the remaining pages.
pub const MARGIN: f64 = 0.15;
/// The assumed fixed costs of a guest with small devices: stop, save, load and start.
pub const FIXED_DOWNTIME: std::time::Duration = std::time::Duration::from_millis(4);
/// The part of the limit that is always available for sync and remaining pages. No further round reduces the fixed
/// costs, so they must not prevent the handover forever.
const LEAST_SHARE: f64 = 0.25;

/// The downtime if the guest were stopped now, by part. Times are in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DowntimeEstimate {
    /// The fixed costs: stop, devices, start.
    pub fixed: f64,
    /// Duration of the last sync.
    pub sync: f64,
    /// Sending the data in sockets, and then the remaining pages.
    pub remaining: f64,
    /// Safety margin for sync and remaining pages, relative to their time.
    pub margin: f64,
}

impl DowntimeEstimate {
    /// The expected downtime.
    pub fn expected(self) -> f64 {
        self.fixed + self.sync + self.remaining
    }

    /// The downtime with the safety margin.
    pub fn longest(self) -> f64 {
        self.fixed + self.with_margin()
    }

    /// Whether the guest may be stopped under this limit, in seconds.
    pub fn fits(self, limit: f64) -> bool {
        self.with_margin() <= allowed(limit, self.fixed)
    }

    /// The least limit, in seconds, under which the guest may be stopped.
    pub fn least_limit(self) -> f64 {
        self.longest().min(self.with_margin() / LEAST_SHARE)
    }

    fn with_margin(self) -> f64 {
        (self.sync + self.remaining) * (1.0 + self.margin)
    }
}

/// The time, in seconds, that sync and remaining pages may take under a limit, with their margin.
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
