//! Which jobs are not like the others: those that must run alone, that need more time, or that begin first.

use std::time::Duration;

use super::{Beside, Job};

/// Tests of one process that run at once. More processes do more than more threads: cases wait for each other.
pub const THREADS: usize = 2;

/// A job that takes longer hangs.
pub const LIMIT: Duration = Duration::from_secs(600);

/// Cargo may have everything to build, beside the tests that run already.
pub const CARGO_LIMIT: Duration = Duration::from_secs(3600);

/// Six Debian roots may have to be downloaded, from a mirror that may be slow.
pub const DOWNLOAD_LIMIT: Duration = Duration::from_secs(3600);

/// What draws at random draws the same in each run, unless the caller sets another seed: whether a commit passes must not
/// hang on chance. `cargo xtask soak` and `cargo xtask fuzz` explore.
pub const SEEDS: [(&str, &str); 2] = [("STERNA_SEED", "1"), ("PROPTEST_RNG_SEED", "1")];

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
