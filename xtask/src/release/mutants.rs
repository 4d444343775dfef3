//! Mutants of `sterna-proto`: a test must notice each change of the handover's machines.

use std::path::Path;
use std::time::{Duration, Instant};

use super::tools;
use crate::parts::Outcome;
use crate::process::Result;
use crate::workspace::target_directory;

/// Time limit of a run, in minutes. All mutants take hours; they run in random order, so that every run tries
/// others.
pub const MINUTES: u64 = 30;
/// Schedules of the simulator for each mutant: a sixth of the number in the tests. A mutant rarely
/// survives them.
const SCHEDULES: &str = "50000";

/// Fails with the mutants that no test notices within `minutes`. `.cargo/mutants.toml` lists the permitted ones,
/// each with a reason.
pub fn check(minutes: u64) -> Result<Outcome> {
    let limit = Duration::from_secs(minutes * 60);
    let tool = match tools::installed(&tools::MUTANTS) {
        Ok(tool) => tool,
        Err(why) => return Ok(Outcome::Skipped(why)),
    };
    let mut command = tools::command(&tool);
    command.args([
        "mutants",
        "--package",
        "sterna-proto",
        "--shuffle",
        "--colors",
        "never",
        "--baseline",
        "skip",
    ]);
    command.args(["--timeout", "120", "--build-timeout", "300", "--output"]).arg(target_directory());
    command.env("STERNA_SEED", "1").env("STERNA_SCHEDULES", SCHEDULES);
    let mut child = command.spawn().map_err(|error| format!("cannot start {}: {error}", tool.display()))?;
    let began = Instant::now();
    let ended = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break Some(status),
            None if began.elapsed() > limit => break None,
            None => std::thread::sleep(Duration::from_millis(500)),
        }
    };
    if ended.is_none() {
        // The tool may be inside a mutant. Killing it is safe, because it changes a copy of the
        // sources.
        child.kill().and_then(|()| child.wait()).map_err(|error| error.to_string())?;
    }
    let out = target_directory().join("mutants.out");
    let missed = lines(&out.join("missed.txt"));
    if !missed.is_empty() {
        return Err(format!("no test notices: {}", missed.join("; ")));
    }
    let (noticed, hung) = (lines(&out.join("caught.txt")).len(), lines(&out.join("timeout.txt")).len());
    match ended {
        // Status 3: some mutants exceeded the time limit, which the tests notice too.
        Some(status) if status.success() || status.code() == Some(3) => Ok(Outcome::Passed),
        Some(status) => Err(format!("cargo-mutants ended with {status}")),
        None => {
            Ok(Outcome::Partly(format!("{} mutants noticed; the limit of time ended it", noticed + hung)))
        }
    }
}

fn lines(file: &Path) -> Vec<String> {
    std::fs::read_to_string(file).unwrap_or_default().lines().map(str::to_owned).collect()
}
