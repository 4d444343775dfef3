//! The part `interop`: tests in which real QEMU and real libvirt judge what Sterna writes and reads.
//!
//! The tests live in `interop/` (crate sterna-interop) and find the roots by themselves; a test that cannot
//! run here says `SKIPPED name: reason`, and is named in the closing lines.

use crate::parts::Parts;
use crate::process::{Failure, Result};
use crate::roots;
use crate::suite::{Binary, Build, Job, Runner};
use crate::workspace::Metadata;

/// The crate of the tests.
pub const PACKAGE: &str = "sterna-interop";

/// `cargo xtask interop [SUBJECT…]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    if let Some(option) = arguments.iter().find(|argument| argument.starts_with('-')) {
        return Err(Failure::Usage(format!(
            "interop takes names of files in interop/tests/it, not `{option}`"
        )));
    }
    let targets = Metadata::of_members(None)?.targets();
    let tests = targets.iter().find(|target| target.package == PACKAGE && target.kind == "test");
    let is_subject = |name: &String| tests.is_some_and(|tests| tests.has_module(name));
    if let Some(unknown) = arguments.iter().find(|name| !is_subject(name)) {
        return Err(Failure::Usage(format!("there is no interop/tests/it/{unknown}.rs")));
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
