//! Jobs with special rules: those that run alone, need more time, or start first.

use std::time::Duration;

use super::{Beside, Job};

/// Number of tests that one process runs in parallel. More processes help more than more threads,
/// because tests wait for each other.
pub const THREADS: usize = 2;

/// Time limit of a job, after which it counts as hung. Limits are in time as on a quiet machine
/// ([`sterna_testing::CoreTime`]).
pub const LIMIT: Duration = Duration::from_secs(600);

/// Largest time of a job on the clock, as a multiple of its limit.
pub const MOST_TIMES: u32 = 6;

/// Time limit of a job that calls cargo. It may have to build everything while tests run.
pub const CARGO_LIMIT: Duration = Duration::from_secs(3600);

/// Time limit of a job that may download six Debian roots from a slow mirror.
pub const DOWNLOAD_LIMIT: Duration = Duration::from_secs(3600);

/// Seeds that make random tests repeat the same draws, unless the caller sets another seed. The
/// result for a commit must not depend on chance. `cargo xtask soak` and `cargo xtask fuzz`
/// explore.
pub const SEEDS: [(&str, &str); 2] = [("STERNA_SEED", "1"), ("PROPTEST_RNG_SEED", "1")];

/// Jobs that run without any other job, and the reason.
const ALONE: &[(&str, &str)] = &[(
    "sterna-guests guests throttle",
    "compares how fast a guest goes when it is throttled, and when it is free",
)];

/// Rough durations in seconds of the longest jobs, for a machine without stored durations.
pub const LONG: &[(&str, f64)] = &[
    ("sterna-vmm machine ring", 50.0),
    ("sterna-vmm machine moving", 45.0),
    ("sterna-soak soak", 39.0),
    ("sterna-ram memory ring", 20.0),
    ("sterna-cli command demo", 16.0),
    ("sterna-cli command vfio_user", 12.0),
];

/// Applies the special rules to a job.
pub fn apply(job: Job) -> Job {
    if ALONE.iter().any(|(name, _)| *name == job.name) {
        return Job { beside: Beside::Nothing, ..job };
    }
    job
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quick;
    use crate::workspace::Metadata;

    #[test]
    fn modules_that_are_named_here_exist() {
        let targets = Metadata::of_members(None).expect("the workspace").targets();
        let named = ALONE.iter().map(|(name, _)| *name).chain(LONG.iter().map(|(name, _)| *name));
        for name in named.chain(quick::NOT) {
            let [package, target, module] = name.split(' ').collect::<Vec<_>>()[..] else { continue };
            let target = targets.iter().find(|found| found.package == package && found.name == target);
            assert!(target.is_some_and(|target| target.has_module(module)), "no tests are named `{name}`");
        }
    }
}
