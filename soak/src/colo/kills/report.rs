//! Plays many cases, two at a time, and counts their results.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::blow::Planted;
use super::{Killed, one};

/// Cases in parallel. A case mostly waits for a lease to end.
const AT_ONCE: usize = 2;

/// Results of many cases.
#[derive(Debug, Clone, Default)]
pub struct Report {
    what: BTreeMap<String, u64>,
    passed: u64,
    failed: u64,
    again: u64,
    packets: usize,
    woken: u64,
    late: u64,
    first: Option<u64>,
    last: u64,
    took: Duration,
    interrupted: bool,
}

/// Plays the cases, two at a time. `tell` is called for each failure.
pub fn many(
    program: &Path,
    numbers: Range<u64>,
    seed: u64,
    planted: Option<Planted>,
    interrupted: &AtomicBool,
    tell: impl Fn(&str) + Sync,
) -> Report {
    let (began, next) = (Instant::now(), AtomicU64::new(numbers.start));
    let report = Mutex::new(Report::default());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while !interrupted.load(Ordering::SeqCst) {
                    let number = next.fetch_add(1, Ordering::SeqCst);
                    if number >= numbers.end {
                        return;
                    }
                    let played = one(program, seed, number, planted);
                    if let Err(why) = &played {
                        tell(why);
                    }
                    report.lock().add(played);
                }
                report.lock().interrupted = true;
            });
        }
    });
    Report { took: began.elapsed(), ..report.into_inner() }
}

impl Report {
    /// Whether all cases were played and none failed.
    pub fn is_good(&self) -> bool {
        self.failed == 0 && !self.interrupted
    }

    fn add(&mut self, played: Result<Killed, String>) {
        let Ok(killed) = played else {
            self.failed += 1;
            return;
        };
        self.passed += 1;
        self.again += killed.again;
        self.packets += killed.packets;
        self.woken += u64::from(killed.late_bytes.is_some());
        self.late += u64::from(killed.late_bytes.is_some_and(|bytes| bytes > 0));
        self.first = Some(self.first.map_or(killed.checkpoint, |first| first.min(killed.checkpoint)));
        self.last = self.last.max(killed.checkpoint);
        *self.what.entry(killed.what).or_default() += 1;
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, count) in &self.what {
            writeln!(f, "{count:5}  {what}")?;
        }
        let Self { passed, failed, again, packets, woken, late, .. } = self;
        writeln!(
            f,
            "survivors from checkpoints {} to {}; {packets} packets heard; {woken} primaries woke, {late} of them in the middle of a piece; \
             {again} plays again, whose primary was alone before; {:.0} s{}",
            self.first.unwrap_or_default(),
            self.last,
            self.took.as_secs_f64(),
            if self.interrupted { "; interrupted" } else { "" },
        )?;
        write!(f, "{passed} from a held checkpoint, {failed} failed")
    }
}
