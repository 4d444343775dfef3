//! What came of several cases.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::case::Kind;
use super::{Played, one};
use crate::leaks;

/// Ends and states of several cases.
#[derive(Debug, Default)]
pub struct Report {
    /// By trouble and end.
    ends: BTreeMap<(&'static str, String), u64>,
    /// How often something went wrong, by the states of source and destination.
    struck: BTreeMap<String, u64>,
    failed: u64,
    /// Resident memory after the first tenth of the cases and at the end, bytes.
    resident_bytes: (u64, u64),
    took: Duration,
    interrupted: bool,
}

/// Plays the cases of these numbers, one after the other; `tell` hears of each.
pub fn several(
    kind: Kind,
    seed: u64,
    numbers: Range<u64>,
    program: &Path,
    interrupted: &AtomicBool,
    mut tell: impl FnMut(u64, &Result<Played, String>),
) -> Report {
    let (mut report, began) = (Report::default(), Instant::now());
    let early = numbers.start + (numbers.end - numbers.start).div_ceil(10);
    for number in numbers {
        if interrupted.load(Ordering::SeqCst) {
            report.interrupted = true;
            break;
        }
        let played = one(kind, seed, number, program);
        tell(number, &played);
        match played {
            Ok(played) => {
                *report.ends.entry((played.trouble, played.end)).or_default() += 1;
                for states in played.struck {
                    *report.struck.entry(states).or_default() += 1;
                }
            }
            Err(_) => report.failed += 1,
        }
        if number + 1 == early {
            report.resident_bytes.0 = leaks::resident_bytes();
        }
    }
    report.resident_bytes.1 = leaks::resident_bytes();
    report.took = began.elapsed();
    report
}

impl Report {
    /// Whether nothing was wrong and nothing has grown.
    pub fn is_good(&self) -> bool {
        self.failed == 0 && !self.has_grown() && !self.interrupted
    }

    fn has_grown(&self) -> bool {
        let (early, late) = self.resident_bytes;
        early > 0 && late > early + crate::DRIFT_BYTES
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for ((trouble, end), count) in &self.ends {
            writeln!(f, "{trouble:20} {count:5}  {end}")?;
        }
        writeln!(f, "struck while source / destination were:")?;
        for (states, count) in &self.struck {
            writeln!(f, "{count:7}  {states}")?;
        }
        let (early, late) = self.resident_bytes;
        let grown = if self.has_grown() { ": IT HAS GROWN" } else { "" };
        writeln!(f, "resident memory: {} MiB early, {} MiB at the end{grown}", early >> 20, late >> 20)?;
        if self.interrupted {
            writeln!(f, "interrupted")?;
        }
        let passed = self.ends.values().sum::<u64>();
        write!(f, "{passed} passed, {} failed ({:.1} s)", self.failed, self.took.as_secs_f64())
    }
}
