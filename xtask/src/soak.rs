//! The soak: migrations cancelled, cut and killed in every state, and what they leave behind.
//!
//! The work is done by the target called `soak`; this file finds it, runs it and hands on how many.

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};
use crate::workspace::Metadata;

/// What the issue asks for.
const FULL: u64 = 1000;

/// `cargo xtask soak [--count N]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    let count = match arguments {
        [] => FULL,
        [option, count] if option == "--count" => {
            count.parse().map_err(|_| Failure::Usage(format!("`{count}` is no count")))?
        }
        _ => return Err(Failure::Usage("soak takes only `--count N`".into())),
    };
    let mut parts = Parts::default();
    parts.part("soak", || run(count, true));
    parts.finish()
}

/// Runs `count` disturbed migrations, in the profile of the tests unless `release`.
pub fn run(count: u64, release: bool) -> Result<Outcome> {
    let Some(target) = Metadata::of_members(None)?.target("soak") else {
        return Ok(Outcome::Skipped("no target is called `soak`".into()));
    };
    let mut command = process::cargo();
    let kind = if target.kind == "example" { "--example" } else { "--bin" };
    if !matches!(target.kind.as_str(), "bin" | "example") {
        return Err(format!("`soak` of {} is a {}, not a program", target.package, target.kind));
    }
    command.args(["run", "--quiet", "--package", &target.package, kind, "soak"]);
    if release {
        command.arg("--release");
    }
    command.args(["--", "--count", &count.to_string()]);
    process::run(&mut command).map(|()| Outcome::Passed)
}
