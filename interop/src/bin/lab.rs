//! Boots the lab VM and runs scenarios. The first argument names their kind: `kvm` (the default), `linux`,
//! `rdma` or `rdma-pair`.
//!
//! - `--all` adds the scenarios that take long.
//! - `--only=TEXT` runs the scenarios whose name contains the text; an underscore means a blank.
//! - `rdma --bench [--quick] [--json FILE]` runs the bench instead.
//! - `rdma --reliability[=COUNT] [--seed=NUMBER] [--from=NUMBER]` runs that many disturbed migrations.
//!
//! Exit code 0: all scenarios passed, or the lab cannot be built here (reported as SKIPPED). 1: a scenario
//! failed. 2: the arguments are wrong.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

use sterna_interop::lab::{self, Kind, Outcome, Selection};

/// Option with the file for the bench's results.
const JSON: &str = "--json";

fn main() -> ExitCode {
    if std::process::id() == 1 {
        lab::run_as_init();
    }
    if let Some(failures) = lab::run_in_tree_as_asked() {
        return ExitCode::from(failures);
    }
    let name = std::env::args().nth(1).unwrap_or_else(|| Kind::Kvm.name().to_owned());
    let Some(kind) = Kind::named(&name) else {
        eprintln!("there is no lab `{name}`");
        return ExitCode::from(2);
    };
    let (mut results, mut chosen) = (None, Vec::new());
    let mut arguments = std::env::args().skip(2);
    while let Some(argument) = arguments.next() {
        match argument.strip_prefix(JSON) {
            Some("") => results = arguments.next(),
            Some(path) if path.starts_with('=') => results = Some(path[1..].to_owned()),
            _ => chosen.push(argument),
        }
    }
    let selection = match Selection::of_arguments(chosen) {
        Ok(selection) => selection,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::from(2);
        }
    };
    let report = |line: &str| match (line.strip_prefix(lab::RESULTS), &results) {
        (Some(json), Some(path)) => written(path, json),
        _ => println!("{line}"),
    };
    match lab::run(kind, &selection, report) {
        Outcome::Passed => ExitCode::SUCCESS,
        Outcome::Skipped(why) => {
            eprintln!("SKIPPED lab {name}: {why}");
            ExitCode::SUCCESS
        }
        Outcome::Failed(-1) => {
            eprintln!("the lab VM did not get to the end");
            ExitCode::FAILURE
        }
        Outcome::Failed(count) => {
            eprintln!("{count} scenarios failed in the lab VM");
            ExitCode::FAILURE
        }
    }
}

fn written(path: &str, json: &str) {
    if let Err(error) = std::fs::write(path, format!("{json}\n")) {
        eprintln!("{path}: {error}");
    }
}
