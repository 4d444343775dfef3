//! The benches: `micro` (scan, bitmap, packets) and `e2e` (whole migrations on loopback against a plain copy).

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};
use crate::workspace::Metadata;

const BENCHES: [&str; 2] = ["micro", "e2e"];

/// `cargo xtask bench [micro|e2e] [-- ARGS]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    let (ours, theirs) = crate::demo::split_at_dashes(arguments);
    let wanted: Vec<&str> = match ours {
        [] => BENCHES.to_vec(),
        [one] if BENCHES.contains(&one.as_str()) => vec![one],
        [other, ..] => return Err(Failure::Usage(format!("there is no bench `{other}`: micro or e2e"))),
    };
    let mut parts = Parts::default();
    for name in wanted {
        parts.part(name, || run(name, theirs));
    }
    parts.finish()
}

/// Runs one bench, always optimised.
fn run(name: &str, arguments: &[String]) -> Result<Outcome> {
    let Some(target) = Metadata::of_members(None)?.target(name) else {
        return Ok(Outcome::Skipped(format!("no target is called `{name}`")));
    };
    let mut command = process::cargo();
    match target.kind.as_str() {
        "bench" => command.args(["bench", "--quiet", "--package", &target.package, "--bench", name, "--"]),
        "bin" | "example" => {
            let kind = format!("--{}", target.kind);
            command.args(["run", "--quiet", "--release", "--package", &target.package, &kind, name, "--"])
        }
        other => return Err(format!("`{name}` of {} is a {other}, not a bench", target.package)),
    };
    process::run(command.args(arguments)).map(|()| Outcome::Passed)
}
