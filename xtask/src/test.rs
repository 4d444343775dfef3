//! `cargo xtask test`: runs everything that must pass before a commit is merged.
//!
//! Steps that take seconds run first, one after the other. The scheduler runs the rest. One build
//! creates all programs in one profile (`dev`, which is optimised and keeps every check). Each
//! program runs as soon as it is linked. Lints and doctests run while tests wait.

use std::process::Command;

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure};
use crate::suite::{Binary, Build, Job, Runner, built_program};
use crate::{imports, interop, lab, layering, licences, machines, quick, roots, setup, sources};

const PARTS: [&str; 17] = [
    "setup", "format", "licences", "layers", "imports", "machines", "sources", "build", "tests", "doctests",
    "lints", "roots", "interop", "soak", "demo", "fuzz", "lab",
];

/// Sizes of the samples from commands that take hours in full.
const SOAK_SAMPLE: &str = "60";
const DEMO_SAMPLE: &str = "2";

/// Parts that run programs of the build.
const BUILT: [&str; 6] = ["tests", "interop", "soak", "demo", "fuzz", "lab"];

/// Runs all parts, a quick selection, or the named parts: `cargo xtask test [--quick | PART…]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    match arguments.first().map(String::as_str) {
        Some("--list") => {
            println!("{}", PARTS.join("\n"));
            return Ok(());
        }
        Some("--quick") if arguments.len() == 1 => return quick::command(),
        _ => {}
    }
    if let Some(unknown) = arguments.iter().find(|name| !PARTS.contains(&name.as_str())) {
        return Err(Failure::Usage(format!("there is no part `{unknown}`; there are {}", PARTS.join(", "))));
    }
    let mut parts = Parts::only(arguments);
    parts.part("setup", setup::everything);
    rules(&mut parts);
    let mut runner = Runner::new()?;
    let builds = BUILT.iter().any(|part| parts.wants(part)) || parts.wants("build");
    if parts.wants("doctests") {
        runner.add(doctests());
    }
    if parts.wants("lints") {
        runner.add(lints());
    }
    if parts.wants("roots") || parts.wants("interop") || parts.wants("lab") {
        runner.add(roots::job());
    }
    if parts.wants("soak") {
        let mut soak = Command::new(built_program("soak"));
        soak.args(["--count", SOAK_SAMPLE]);
        runner.add(Job::new("soak", "soak", soak).after(&["build"]));
    }
    if parts.wants("demo") {
        runner.add(Job::of_ours("demo", &["demo-loop", DEMO_SAMPLE, "--built"]).after(&["build"]));
    }
    if parts.wants("fuzz") {
        runner.add(Job::of_ours("fuzz", &["fuzz", "--check"]).after(&["build"]));
    }
    if parts.wants("lab") {
        lab::add_all(&mut runner, &mut parts);
    }
    let wanted = |binary: &Binary| {
        let part = if binary.package == interop::PACKAGE { "interop" } else { "tests" };
        if parts.wants(part) { binary.jobs() } else { Ok(Vec::new()) }
    };
    println!();
    let report = runner.run(if builds { Some(Build::new()?) } else { None }, wanted)?;
    report.close(&mut parts);
    parts.finish()
}

/// Runs the rules alone: `cargo xtask check`.
pub fn check_command(arguments: &[String]) -> std::result::Result<(), Failure> {
    if let Some(extra) = arguments.first() {
        return Err(Failure::Usage(format!("check takes no `{extra}`")));
    }
    let mut parts = Parts::default();
    rules(&mut parts);
    parts.part("lints", || process::run(&mut clippy()).map(|()| Outcome::Passed));
    parts.finish()
}

/// Rules that only read files; they take seconds in total.
pub fn rules(parts: &mut Parts) {
    parts.part("format", || {
        process::run(process::cargo().args(["fmt", "--all", "--check"])).map(|()| Outcome::Passed)
    });
    parts.part("licences", licences::check);
    parts.part("layers", layering::check);
    parts.part("imports", imports::check);
    parts.part("machines", machines::check);
    parts.part("sources", sources::check);
}

/// Clippy over everything; a warning is an error.
pub fn lints() -> Job {
    Job::new("lints", "lints", clippy()).calls_cargo()
}

fn clippy() -> Command {
    let mut command = process::cargo();
    command.args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    command
}

fn doctests() -> Job {
    let mut command = process::cargo();
    command.args(["test", "--workspace", "--doc", "--no-fail-fast"]);
    Job::new("doctests", "doctests", command).calls_cargo()
}
