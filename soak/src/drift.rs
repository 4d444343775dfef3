//! Detects growth of the process from case to case.

use std::fmt;
use std::time::Duration;

use crate::leaks::{Belongings, resident_bytes};

/// Limit of growth of resident memory, in bytes, if all threads share one heap. It counts from the end of the
/// first tenth of the cases. Such a heap keeps free pieces below used ones: up to 13 MiB.
const MOST_OF_ONE_HEAP: u64 = 16 << 20;
/// The same limit if the C library makes a heap for each of many threads. Each heap keeps free pieces, and
/// chance decides which thread allocates. 200 cases that leave 0.04 MiB in use grow by 27 MiB.
const MOST_OF_MANY_HEAPS: u64 = 48 << 20;
/// Environment variable that limits the C library's heaps.
pub const HEAPS: &str = "MALLOC_ARENA_MAX";
/// Limit of the time that a thread needs to end after its order.
pub const LIMIT: Duration = Duration::from_secs(5);

/// State of the process when it is warm, and at the end. It is warm after the first tenth of its cases.
#[derive(Debug, Default)]
pub struct Drift {
    most_bytes: u64,
    /// Number of cases until the process is warm.
    left: u64,
    early: Option<(Belongings, u64)>,
    late: Option<(Belongings, u64)>,
}

impl Drift {
    /// Measures a run of `cases` cases.
    pub fn over(cases: u64) -> Self {
        let has_one_heap = std::env::var(HEAPS).is_ok_and(|heaps| heaps == "1");
        let most_bytes = if has_one_heap { MOST_OF_ONE_HEAP } else { MOST_OF_MANY_HEAPS };
        Self { most_bytes, left: cases.div_ceil(10), early: None, late: None }
    }

    /// Counts a case as played.
    pub fn played(&mut self) {
        self.left = self.left.saturating_sub(1);
        if self.left == 0 && self.early.is_none() {
            self.early = Some((Belongings::now(), resident_bytes()));
        }
    }

    /// Takes the final measurement, after the last case. Threads get up to `limit` to end.
    pub fn end(&mut self, limit: Duration) {
        if let Some((early, _)) = self.early {
            // The result is ignored, because the measurement below shows everything that remains.
            let _ = early.wait_restored(limit);
        }
        self.late = Some((Belongings::now(), resident_bytes()));
    }

    /// The kinds of resources that have grown, one word each.
    pub fn grown(&self) -> Vec<&'static str> {
        let (Some((early, early_bytes)), Some((late, late_bytes))) = (self.early, self.late) else {
            return Vec::new();
        };
        let all = [
            ("threads", late.threads > early.threads),
            ("descriptors", late.descriptors > early.descriptors),
            ("mappings", !late.mappings.is_within(&early.mappings)),
            ("resident memory", late_bytes > early_bytes + self.most_bytes),
        ];
        all.into_iter().filter(|(_, has_grown)| *has_grown).map(|(what, _)| what).collect()
    }
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (when, what) in [("early", &self.early), ("at the end", &self.late)] {
            if let Some((has, bytes)) = what {
                writeln!(
                    f,
                    "{when}: {} threads, {} descriptors, {}, {} MiB resident",
                    has.threads,
                    has.descriptors,
                    has.mappings,
                    bytes >> 20
                )?;
            }
        }
        match self.grown()[..] {
            [] => Ok(()),
            ref grown => writeln!(f, "GROWN: {}", grown.join(", ")),
        }
    }
}
