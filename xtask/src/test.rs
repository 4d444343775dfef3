//! `cargo xtask test`: everything that must pass, in the order in which a mistake shows soonest.
//!
//! One profile serves all parts that build the workspace (`dev`, which is optimised and keeps every check),
//! so that one build is enough.

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};
use crate::{demo, fuzz, interop, lab, layering, licences, roots, setup, soak, sources};

const PARTS: [&str; 13] = [
    "setup", "format", "licences", "layers", "sources", "lints", "tests", "roots", "interop", "soak", "demo",
    "fuzz", "lab",
];

/// How much of what takes hours elsewhere is taken as a sample here.
const SOAK_SAMPLE: u64 = 60;
const DEMO_SAMPLE: u64 = 2;

/// `cargo xtask test [PART…]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    if arguments.first().is_some_and(|first| first == "--list") {
        println!("{}", PARTS.join("\n"));
        return Ok(());
    }
    if let Some(unknown) = arguments.iter().find(|name| !PARTS.contains(&name.as_str())) {
        return Err(Failure::Usage(format!("there is no part `{unknown}`; there are {}", PARTS.join(", "))));
    }
    let mut parts = Parts::only(arguments);
    parts.part("setup", setup::everything);
    // They come over the network while the compiler works.
    let building = (parts.wants("roots") || parts.wants("interop")).then(roots::in_background);
    quick(&mut parts);
    let (mut skipped, mut versions) = (Vec::new(), Vec::new());
    parts.part("tests", || tests(&mut skipped));
    if let Some(building) = building {
        parts.part("roots", || building.finish(&mut versions));
    }
    parts.part("interop", || interop::run(&mut skipped));
    parts.part("soak", || soak::run(SOAK_SAMPLE, None, false));
    parts.part("demo", || demo::run(DEMO_SAMPLE, &[], false));
    parts.part("fuzz", fuzz::check);
    parts.part("lab", lab::run);
    for line in versions.into_iter().chain(skipped) {
        parts.note(line);
    }
    parts.finish()
}

/// `cargo xtask check`.
pub fn check_command(arguments: &[String]) -> std::result::Result<(), Failure> {
    if let Some(extra) = arguments.first() {
        return Err(Failure::Usage(format!("check takes no `{extra}`")));
    }
    let mut parts = Parts::default();
    quick(&mut parts);
    parts.finish()
}

fn quick(parts: &mut Parts) {
    parts.part("format", || {
        process::run(process::cargo().args(["fmt", "--all", "--check"])).map(|()| Outcome::Passed)
    });
    parts.part("licences", licences::check);
    parts.part("layers", layering::check);
    parts.part("sources", sources::check);
    parts.part("lints", lints);
}

fn lints() -> Result<Outcome> {
    let mut command = process::cargo();
    command.args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    process::run(&mut command).map(|()| Outcome::Passed)
}

fn tests(skipped: &mut Vec<String>) -> Result<Outcome> {
    let mut command = process::cargo();
    command.args(["test", "--workspace", "--exclude", interop::PACKAGE, "--no-fail-fast"]);
    let (done, found) = process::run_and_watch(&mut command, "SKIPPED ");
    let count = found.len();
    skipped.extend(found);
    done.map(
        |()| if count == 0 { Outcome::Passed } else { Outcome::Partly(format!("{count} tests skipped")) },
    )
}
