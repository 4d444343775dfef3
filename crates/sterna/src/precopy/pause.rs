//! Whether the rest fits the pause: the one rule by which the engine stops a guest, and by which forecasts and verdicts
//! say beforehand whether it will (specs/convergence.md §2.3).

/// By which part the engine expects the rest to take longer than lanes at their usual pace would, at least.
pub const MARGIN: f64 = 0.15;
/// What stopping, saving, loading and starting a guest with small devices takes, where nobody knows better.
pub const FIXED_PAUSE: std::time::Duration = std::time::Duration::from_millis(4);
/// What look and rest may have of the limit at least, as a part of it: what no round makes shorter must not keep a
/// guest from ever being handed over.
const LEAST_SHARE: f64 = 0.25;

/// A pause as it would be; times in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pause {
    /// What it costs in any case: stop, devices, start.
    pub fixed: f64,
    /// The last look for dirty pages.
    pub look: f64,
    /// Sending what is dirty then, behind what sockets still hold.
    pub rest: f64,
    /// By which part look and rest may well take longer.
    pub margin: f64,
}

impl Pause {
    /// How long it is expected to be.
    pub fn expected(self) -> f64 {
        self.fixed + self.look + self.rest
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
        (self.look + self.rest) * (1.0 + self.margin)
    }
}

/// What look and rest may take under a limit, with their margin.
pub fn allowed(limit: f64, fixed: f64) -> f64 {
    (limit - fixed).max(limit * LEAST_SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Pause = Pause { fixed: 0.02, look: 0.01, rest: 0.03, margin: 0.5 };

    #[test]
    fn pause_fits_from_its_least_limit_on() {
        let dear = Pause { fixed: 1.0, ..PAUSE };
        for (pause, least) in [(PAUSE, 0.08), (dear, 0.24)] {
            assert!((pause.least_limit() - least).abs() < 1e-9, "{pause:?}");
            assert!(pause.fits(least + 1e-9) && !pause.fits(least - 1e-3), "{pause:?}");
        }
    }

    #[test]
    fn pause_has_all_its_parts_and_the_margin_only_for_look_and_rest() {
        assert!((PAUSE.expected() - 0.06).abs() < 1e-9);
        assert!((PAUSE.longest() - 0.08).abs() < 1e-9);
    }
}
