//! Boots the lab VM and runs every scenario on its KVM. Exit code 0: all passed, or the lab cannot be
//! built here (said as SKIPPED); 1: one failed.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

use sterna_interop::lab::{self, Outcome};

fn main() -> ExitCode {
    if std::process::id() == 1 {
        lab::run_as_init();
    }
    match lab::run(|line| println!("{line}")) {
        Outcome::Passed => ExitCode::SUCCESS,
        Outcome::Skipped(why) => {
            eprintln!("SKIPPED lab: {why}");
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
