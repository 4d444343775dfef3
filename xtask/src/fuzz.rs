//! Fuzzing: a fixed number of inputs as part of the tests, and exploring with libFuzzer.
//!
//! The targets are functions of the package `sterna-fuzz`. [`check`] runs its program, which is
//! built like all tests, over the stored inputs and over mutations from a fixed seed. Its result
//! therefore does not depend on chance.
//!
//! `cargo xtask fuzz` explores ([`explore`]) on the stable toolchain, with explicit flags for
//! LLVM's coverage instrumentation. New inputs are added to the stored ones, and the run time is
//! added to a ledger ([`ledger`]).

mod explore;
mod ledger;

use std::path::PathBuf;
use std::process::Command;

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};
use crate::suite::built_program;
use crate::workspace::root;

/// Programs that create the first inputs, most of them from the golden vectors. They are examples
/// of these packages.
const SEEDS: [(&str, &str); 6] = [
    ("fuzz-seeds", "sterna-wire"),
    ("image-seeds", "sterna-image"),
    ("vfio-user-seeds", "sterna-devices"),
    ("virtio-seeds", "sterna-fuzz"),
    ("replica-seeds", "sterna-fuzz"),
    ("relay-seeds", "sterna-fuzz"),
];

/// The parsed arguments of `cargo xtask fuzz`.
struct Request {
    only: Vec<String>,
    seconds: u64,
    jobs: usize,
}

/// `cargo xtask fuzz [TARGET…] [--seconds N] [--jobs N] [--merge | --status | --check]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    let mut request = Request { only: Vec::new(), seconds: 60, jobs: 1 };
    let (mut merge, mut status, mut checks) = (false, false, false);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut number = || {
            let number = rest.next().and_then(|n| n.parse().ok()).filter(|n| *n > 0);
            number.ok_or_else(|| Failure::Usage(format!("{argument} needs a number above 0")))
        };
        match argument.as_str() {
            "--seconds" => request.seconds = number()?,
            "--jobs" => request.jobs = number()? as usize,
            "--merge" => merge = true,
            "--status" => status = true,
            "--check" => checks = true,
            option if option.starts_with('-') => {
                return Err(Failure::Usage(format!("fuzz has no option `{option}`")));
            }
            target => request.only.push(target.to_owned()),
        }
    }
    if status {
        print!("{}", ledger::Ledger::read()?.table());
        return Ok(());
    }
    let mut parts = Parts::default();
    if checks {
        parts.part("fuzz", check);
    } else if merge {
        parts.part("merge", || explore::merge(&request));
    } else {
        parts.part("fuzz", || explore::explore(&request));
    }
    parts.finish()
}

/// Runs each target's stored inputs and a fixed number of mutations.
///
/// Uses the programs that the tests' build created.
fn check() -> Result<Outcome> {
    let directory = root().join("fuzz/seeds");
    for (example, _) in SEEDS {
        let program = built_program("examples").join(example);
        process::run(Command::new(program).arg(&directory))?;
    }
    let mut runner = Command::new(built_program("sterna-fuzz"));
    process::run(runner.arg("check").arg("--seeds").arg(directory)).map(|()| Outcome::Passed)
}

/// The directory `fuzz/NAME/TARGET` in the workspace.
fn directory(name: &str, target: &str) -> PathBuf {
    root().join("fuzz").join(name).join(target)
}
