//! Estimates whether copying pages or protecting them pauses the guest for a shorter time.
//!
//! Copying costs time for each page. Protecting costs a system call for each run of pages, and a smaller cost for
//! each page. Therefore scattered pages are copied. The costs depend on the host, on KVM and on its other load:
//! the last measurement has the greatest weight.

use std::time::Duration;

/// Fewer pages are always copied, because that takes negligible time.
///
/// The guest's writes to them do not block.
const LEAST_PAGES: u64 = 256;
/// The most clean pages between two runs that are protected together in one call.
///
/// The guest blocks at its first write to each of these clean pages.
const MOST_GAP: u64 = 64;
/// Factor on the cost of the way that was not chosen. After enough checkpoints that way is tried again.
const HOPE: f64 = 0.995;

/// Measured costs in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Costs {
    copied_page: f64,
    protected_page: f64,
    call: f64,
}

impl Default for Costs {
    /// Costs of a call, of protecting and of copying a page, on one development machine.
    fn default() -> Self {
        Self { copied_page: 400.0, protected_page: 70.0, call: 3000.0 }
    }
}

/// The size of a protection: `calls` runs with `pages` pages in total.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Runs {
    pub(crate) calls: u64,
    pub(crate) pages: u64,
}

impl Costs {
    /// The most clean pages between two runs that cost less than a second call.
    pub(crate) fn gap(&self) -> u64 {
        ((self.call / self.protected_page) as u64).min(MOST_GAP)
    }

    /// Whether protecting `runs` pauses the guest for a shorter time than copying `pages`.
    pub(crate) fn prefer_protecting(&self, pages: u64, runs: Runs) -> bool {
        pages >= LEAST_PAGES && self.protecting(runs) < self.copied_page * pages as f64
    }

    /// Updates the cost of a copied page after `pages` were copied.
    pub(crate) fn copied(&mut self, pages: u64, took: Duration) {
        if pages >= LEAST_PAGES {
            let each = took.as_nanos() as f64 / pages as f64;
            self.copied_page = f64::midpoint(self.copied_page, each);
            (self.protected_page, self.call) = (self.protected_page * HOPE, self.call * HOPE);
        }
    }

    /// Updates the costs of protection after `runs` were protected.
    pub(crate) fn protected(&mut self, runs: Runs, took: Duration) {
        let expected = self.protecting(runs);
        if runs.pages > 0 && expected > 0.0 {
            let factor = f64::midpoint(1.0, took.as_nanos() as f64 / expected);
            (self.protected_page, self.call) = (self.protected_page * factor, self.call * factor);
            self.copied_page *= HOPE;
        }
    }

    fn protecting(&self, runs: Runs) -> f64 {
        self.call * runs.calls as f64 + self.protected_page * runs.pages as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DENSE: Runs = Runs { calls: 1, pages: 16384 };
    const SCATTERED: Runs = Runs { calls: 16384, pages: 16384 };

    #[test]
    fn runs_are_protected_and_scattered_pages_and_few_are_copied() {
        let costs = Costs::default();
        assert!(costs.prefer_protecting(16384, DENSE));
        assert!(!costs.prefer_protecting(16384, SCATTERED));
        assert!(!costs.prefer_protecting(255, Runs { calls: 1, pages: 255 }));
    }

    #[test]
    fn measured_costs_change_the_choice_and_back() {
        let mut costs = Costs::default();
        for _ in 0..10 {
            costs.protected(DENSE, Duration::from_millis(40));
        }
        assert!(!costs.prefer_protecting(16384, DENSE), "{costs:?}");
        let mut copies = 0;
        while !costs.prefer_protecting(16384, DENSE) {
            costs.copied(16384, Duration::from_micros(6554));
            copies += 1;
            assert!(copies < 2000, "it is tried again one day: {costs:?}");
        }
        assert!(copies > 100, "but seldom: {copies}");
        for _ in 0..10 {
            costs.protected(DENSE, Duration::from_millis(1));
        }
        assert!(costs.prefer_protecting(16384, DENSE));
        assert!(costs.gap() > 0 && costs.gap() <= MOST_GAP);
    }
}
