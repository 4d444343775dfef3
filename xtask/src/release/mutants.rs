//! Mutants of `sterna-proto`: each change of the handover's machines must be noticed by a test.

use std::path::Path;
use std::time::{Duration, Instant};

use super::tools;
use crate::parts::Outcome;
use crate::process::Result;
use crate::workspace::target_directory;

/// All mutants take hours; they come in random order, so that every run tries others.
const LIMIT: Duration = Duration::from_secs(30 * 60);
/// Schedules of the simulator for each mutant: a sixth of what the tests run. A mutant that survives them is rare.
const SCHEDULES: &str = "50000";

/// Fails with the mutants that no test notices. Those that may live are listed in `.cargo/mutants.toml`, each with a reason.
pub fn check() -> Result<Outcome> {
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
            None if began.elapsed() > LIMIT => break None,
            None => std::thread::sleep(Duration::from_millis(500)),
        }
    };
    if ended.is_none() {
        // Between two mutants or in one: it changes a copy of the sources.
        child.kill().and_then(|()| child.wait()).map_err(|error| error.to_string())?;
    }
    let out = target_directory().join("mutants.out");
    let missed = lines(&out.join("missed.txt"));
    if !missed.is_empty() {
        return Err(format!("no test notices: {}", missed.join("; ")));
    }
    let (noticed, hung) = (lines(&out.join("caught.txt")).len(), lines(&out.join("timeout.txt")).len());
    match ended {
        // 3: some mutants ran into the limit of time, which the tests notice, too.
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
