//! The course of a long run in parts of equal length. The memory is bounded: when there are too many parts, each two
//! are merged into one of twice the length.

use std::time::Duration;

/// Initial length of a part, seconds.
const FIRST_LENGTH: f64 = 0.1;
/// Maximum number of parts.
pub(crate) const PARTS: usize = 1024;
/// Maximum number of changes.
pub(crate) const CHANGES: usize = 256;

/// A part of a course.
pub(crate) trait Part: Copy {
    /// Seconds from the start of the course to the start of this part.
    fn at_seconds(&self) -> f64;
    /// The same part at another place and of another length, seconds.
    fn placed(self, at: f64, took: f64) -> Self;
    /// Merges a later part into this one.
    fn merge(&mut self, later: &Self);
}

/// The length of a course's parts, seconds.
#[derive(Debug)]
pub(crate) struct PartLength(f64);

impl Default for PartLength {
    fn default() -> Self {
        Self(FIRST_LENGTH)
    }
}

impl PartLength {
    /// Adds what was seen `at` seconds after the start.
    pub(crate) fn add<P: Part>(&mut self, parts: &mut Vec<P>, at: f64, seen: P) {
        self.put(parts, at / self.0, seen);
        if parts.len() > PARTS {
            self.0 *= 2.0;
            for part in std::mem::replace(parts, Vec::with_capacity(PARTS)) {
                // Both are whole microseconds: the quotient may be a little below its whole number.
                self.put(parts, part.at_seconds() / self.0 + 1e-6, part);
            }
        }
    }

    fn put<P: Part>(&self, parts: &mut Vec<P>, number: f64, seen: P) {
        let begin = whole_micros(number.floor() * self.0);
        match parts.last_mut().filter(|last| begin < last.at_seconds() + self.0 / 2.0) {
            Some(last) => last.merge(&seen),
            None => parts.push(seen.placed(begin, self.0)),
        }
    }
}

/// Adds a change. If there are too many, one from the middle goes: the first and the last stay.
pub(crate) fn add_change<C>(changes: &mut Vec<C>, change: C) {
    if changes.len() >= CHANGES {
        changes.remove(CHANGES / 2);
    }
    changes.push(change);
}

/// The time in seconds, rounded to the microsecond.
pub(crate) fn seconds(time: Duration) -> f64 {
    whole_micros(time.as_secs_f64())
}

/// The seconds, rounded to the microsecond.
pub(crate) fn whole_micros(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}
