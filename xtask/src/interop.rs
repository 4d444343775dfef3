//! The part `interop`: tests in which real QEMU and real libvirt check the data that Sterna writes
//! and reads.
//!
//! The tests are in `interop/` (crate sterna-interop) and find the roots by themselves. A test that
//! cannot run here prints `SKIPPED name: reason`, and the closing lines name it.

use crate::parts::Parts;
use crate::process::{Failure, Result};
use crate::roots;
use crate::suite::{Binary, Build, Job, Runner};
use crate::workspace::Metadata;

/// The package that contains the tests.
pub const PACKAGE: &str = "sterna-interop";

/// Runs all tests, or the named subjects: `cargo xtask interop [SUBJECT…]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    if let Some(option) = arguments.iter().find(|argument| argument.starts_with('-')) {
        return Err(Failure::Usage(format!(
            "interop takes names of files in interop/tests/interop, not `{option}`"
        )));
    }
    let targets = Metadata::of_members(None)?.targets();
    let tests = targets.iter().find(|target| target.package == PACKAGE && target.kind == "test");
    let is_subject = |name: &String| tests.is_some_and(|tests| tests.has_module(name));
    if let Some(unknown) = arguments.iter().find(|name| !is_subject(name)) {
        return Err(Failure::Usage(format!("there is no interop/tests/interop/{unknown}.rs")));
    }
    let mut parts = Parts::default();
    let mut runner = Runner::new()?;
    runner.add(roots::job());
    let report = runner.run(Some(Build::new()?), |binary| wanted(binary, arguments))?;
    report.close(&mut parts);
    parts.finish()
}

fn wanted(binary: &Binary, subjects: &[String]) -> Result<Vec<Job>> {
    if binary.package != PACKAGE {
        return Ok(Vec::new());
    }
    let mut jobs = binary.jobs()?;
    let named = |job: &Job| subjects.iter().any(|subject| job.name.ends_with(&format!(" {subject}")));
    jobs.retain(|job| subjects.is_empty() || named(job));
    Ok(jobs)
}
