//! Estimates the link's time per checkpoint. Pure: no clock, no threads.
//!
//! The estimate prevents that a checkpoint is taken before it can be sent.
//!
//! Checkpoints are sent one after the other. A checkpoint that is taken too early only waits, and the output of
//! the next epoch waits with it.

use std::time::Duration;

/// Fewer pages do not show the link's rate: round trips take most of the time.
const LEAST_PAGES: u64 = 256;

/// Smoothed times of earlier checkpoints.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Service {
    typical: Option<Duration>,
    nanos_per_page: f64,
}

impl Service {
    /// Records that a checkpoint of `pages` needed `took` until it was held.
    pub(super) fn took(&mut self, pages: u64, took: Duration) {
        let nanos = took.as_nanos() as f64;
        let typical = smoothed(self.typical.map(|typical| typical.as_nanos() as f64), nanos);
        self.typical = Some(Duration::from_nanos(typical as u64));
        if pages >= LEAST_PAGES {
            let before = (self.nanos_per_page > 0.0).then_some(self.nanos_per_page);
            self.nanos_per_page = smoothed(before, nanos / pages as f64);
        }
    }

    /// The time that a checkpoint of so many pages needs; `None` before the first measurement.
    pub(super) fn needs(&self, pages: u64) -> Option<Duration> {
        let by_pages = Duration::from_nanos((self.nanos_per_page * pages as f64) as u64);
        self.typical.map(|typical| typical.max(by_pages))
    }

    /// Whether the link could have sent these checkpoints, one after the other, in `since`.
    pub(super) fn could_have_sent(&self, pages: impl Iterator<Item = u64>, since: Duration) -> bool {
        let needed = pages.map(|pages| self.needs(pages)).sum::<Option<Duration>>();
        needed.is_some_and(|needed| since >= needed)
    }
}

/// Smooths measurements. One slow checkpoint counts as at most four usual ones; a link that stays slow shows
/// after some.
fn smoothed(before: Option<f64>, now: f64) -> f64 {
    before.map_or(now, |before| (before * 7.0 + now.min(before * 4.0)) / 8.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn next_one_is_taken_when_the_link_could_have_sent_all_before_it() {
        let mut service = Service::default();
        assert!(!service.could_have_sent([1].into_iter(), 1000 * MS), "nothing is known");
        service.took(10, 20 * MS);

        assert!(!service.could_have_sent([10].into_iter(), 19 * MS));
        assert!(service.could_have_sent([10].into_iter(), 20 * MS));
        assert!(!service.could_have_sent([10, 10, 10].into_iter(), 59 * MS));
        assert!(service.could_have_sent([10, 10, 10].into_iter(), 60 * MS));
    }

    #[test]
    fn large_checkpoint_needs_longer_than_a_small_one() {
        let mut service = Service::default();
        service.took(1000, 10 * MS);

        assert_eq!(service.needs(10), Some(10 * MS));
        assert_eq!(service.needs(20_000), Some(200 * MS));
    }

    #[test]
    fn slow_moment_says_little_and_a_slow_link_is_learnt() {
        let mut service = Service::default();
        let needs = |service: &Service| service.needs(1000).expect("one was held");
        service.took(1000, 10 * MS);
        service.took(1000, 500 * MS);
        assert!(needs(&service) < 15 * MS, "{service:?}");
        (0..20).for_each(|_| service.took(1000, 500 * MS));
        assert!(needs(&service) > 400 * MS, "{service:?}");
        (0..60).for_each(|_| service.took(1000, 10 * MS));
        assert!(needs(&service) < 11 * MS, "{service:?}");
    }
}
