//! Limits the warnings about refused connect requests to a number that an operator can read.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Most warnings in one [`SPAN`].
const MOST: u32 = 20;
const SPAN: Duration = Duration::from_secs(60);

/// The limiter. It is needed because anyone who reaches the port can cause refusals at any rate.
#[derive(Default)]
pub(super) struct Refusals(Mutex<Told>);

#[derive(Default)]
struct Told {
    since: Option<Instant>,
    told: u32,
    /// Refusals since the last reported one.
    untold: u64,
}

impl Refusals {
    /// The text to report for a refusal, or `None` if it is only counted.
    pub(super) fn next(&self, text: &str) -> Option<String> {
        Some(match self.0.lock().next()? {
            0 => text.to_owned(),
            untold => format!("{text} ({untold} others were refused before)"),
        })
    }
}

impl Told {
    /// The number of unreported refusals before this one, if this one is to be reported.
    fn next(&mut self) -> Option<u64> {
        if self.since.is_none_or(|since| since.elapsed() >= SPAN) {
            (self.since, self.told) = (Some(Instant::now()), 0);
        }
        self.told += 1;
        if self.told > MOST {
            self.untold += 1;
            return None;
        }
        Some(std::mem::take(&mut self.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flood_is_told_in_part_and_counted() {
        let mut told = Told::default();
        let said = (0..10_000).filter(|_| told.next() == Some(0)).count();
        // More warnings are possible only if the test took longer than one span.
        assert!(said >= MOST as usize && told.untold > 0, "{said}");
        let untold = told.untold;

        told.since = Some(Instant::now().checked_sub(SPAN).unwrap());

        assert_eq!((told.next(), told.next()), (Some(untold), Some(0)));
    }
}
