//! `cargo xtask test --quick`: a check of a change that takes about a minute. It runs format,
//! rules, lints, and the tests that need neither a VM nor a program of another project.

use crate::parts::Parts;
use crate::process::{Failure, Result};
use crate::suite::{Binary, Build, Job, Runner};
use crate::test;

/// Crates whose integration tests run too: formats, the protocol's machines and the engine.
const WITH_INTEGRATION: [&str; 13] = [
    "sterna-wire",
    "sterna-proto",
    "sterna-arbiter",
    "sterna-ram",
    "sterna-transport",
    "sterna-relay",
    "sterna-store",
    "sterna-image",
    "sterna",
    "sterna-opaque",
    "sterna-pager",
    "sterna-s3",
    "sterna-standby",
];
/// Jobs of these crates that are left out.
///
/// They run a VM, or use a processor for about a minute.
pub const NOT: [&str; 3] = ["sterna-ram memory kvm", "sterna-ram memory ring", "sterna leaks streams"];

/// Runs the quick selection.
pub fn command() -> std::result::Result<(), Failure> {
    let mut parts = Parts::default();
    test::rules(&mut parts);
    let mut runner = Runner::new()?;
    runner.add(test::lints());
    println!();
    let report = runner.run(Some(Build::new()?), wanted)?;
    report.close(&mut parts);
    parts.finish()
}

fn wanted(binary: &Binary) -> Result<Vec<Job>> {
    if binary.kind == "test" && !WITH_INTEGRATION.contains(&binary.package.as_str()) {
        return Ok(Vec::new());
    }
    let mut jobs = binary.jobs()?;
    jobs.retain(|job| !NOT.contains(&job.name.as_str()));
    Ok(jobs)
}
