//! Counts the results of several cases.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::case::Kind;
use super::{Played, one};
use crate::drift::{Drift, LIMIT};

/// Ends and states of several cases.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of cases by trouble and end.
    ends: BTreeMap<(&'static str, String), u64>,
    /// Number of disturbances by the states of source and destination.
    struck: BTreeMap<String, u64>,
    /// Bytes that were sent again, for each case that reports them.
    resent_bytes: Vec<u64>,
    failed: u64,
    drift: Drift,
    took: Duration,
    interrupted: bool,
}

/// Plays the cases of these numbers in order. `tell` is called after each.
pub fn several(
    kind: Kind,
    seed: u64,
    numbers: Range<u64>,
    program: &Path,
    interrupted: &AtomicBool,
    mut tell: impl FnMut(u64, &Result<Played, String>),
) -> Report {
    let drift = Drift::over(numbers.end - numbers.start);
    let (mut report, began) = (Report { drift, ..Report::default() }, Instant::now());
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
                report.resent_bytes.extend(played.resent_bytes);
                for states in played.struck {
                    *report.struck.entry(states).or_default() += 1;
                }
            }
            Err(_) => report.failed += 1,
        }
        report.drift.played();
    }
    report.drift.end(LIMIT);
    report.took = began.elapsed();
    report
}

impl Report {
    /// Whether all cases were right and no resource has grown.
    pub fn is_good(&self) -> bool {
        self.failed == 0 && self.drift.grown().is_empty() && !self.interrupted
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
        let mut resent = self.resent_bytes.clone();
        resent.sort_unstable();
        if let (Some(median), Some(most)) = (resent.get(resent.len() / 2), resent.last()) {
            let kib = |bytes: &u64| bytes.div_ceil(1 << 10);
            let cases = resent.len();
            writeln!(f, "sent again in {cases}: median {} KiB, most {} KiB", kib(median), kib(most))?;
        }
        write!(f, "{}", self.drift)?;
        if self.interrupted {
            writeln!(f, "interrupted")?;
        }
        let passed = self.ends.values().sum::<u64>();
        write!(f, "{passed} passed, {} failed ({:.1} s)", self.failed, self.took.as_secs_f64())
    }
}
