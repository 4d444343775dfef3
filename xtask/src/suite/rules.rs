//! Which jobs are not like the others: those that must run alone, that need more time, or that begin first.

use std::time::Duration;

use super::{Beside, Job};

/// Tests of one process that run at once. More processes do more than more threads: cases wait for each other.
pub const THREADS: usize = 2;

/// A job that takes longer hangs.
pub const LIMIT: Duration = Duration::from_secs(600);

/// Cargo may have everything to build, beside the tests that run already.
pub const CARGO_LIMIT: Duration = Duration::from_secs(3600);

/// Jobs that run with nothing beside them, and why.
const ALONE: &[(&str, &str)] = &[(
    "sterna-guests it throttle",
    "compares how fast a guest goes when it is throttled, and when it is free",
)];

/// Roughly how many seconds the longest take, for a machine that has not measured them yet.
pub const LONG: &[(&str, f64)] = &[
    ("sterna-vmm it ring", 50.0),
    ("sterna-vmm it moving", 45.0),
    ("sterna-soak soak", 39.0),
    ("sterna-ram it ring", 20.0),
    ("sterna-cli it demo", 16.0),
    ("sterna-cli it vfio_user", 12.0),
];

/// Adapts a job to what is known of it.
pub fn apply(job: Job) -> Job {
    if ALONE.iter().any(|(name, _)| *name == job.name) {
        return Job { beside: Beside::Nothing, ..job };
    }
    job
}
