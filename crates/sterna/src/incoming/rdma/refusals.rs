//! Saying what was refused, and not more often than an operator can read.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Warnings in one [`SPAN`].
const MOST: u32 = 20;
const SPAN: Duration = Duration::from_secs(60);

/// Anyone who reaches the port can have requests refused, as fast as they like.
#[derive(Default)]
pub(super) struct Refusals(Mutex<Told>);

#[derive(Default)]
struct Told {
    since: Option<Instant>,
    told: u32,
    /// Refused since the last one that was told.
    untold: u64,
}

impl Refusals {
    /// What to say of one that is refused; nothing if it is only counted.
    pub(super) fn next(&self, text: &str) -> Option<String> {
        Some(match self.0.lock().next()? {
            0 => text.to_owned(),
            untold => format!("{text} ({untold} others were refused before)"),
        })
    }
}

impl Told {
    /// How many were not told before this one, if it is to be told.
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
        // More only if this took longer than a span.
        assert!(said >= MOST as usize && told.untold > 0, "{said}");
        let untold = told.untold;

        told.since = Some(Instant::now().checked_sub(SPAN).unwrap());

        assert_eq!((told.next(), told.next()), (Some(untold), Some(0)));
    }
}
