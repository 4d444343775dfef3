//! The engine under exactly the filters of `sterna::sandbox`, over soft-RoCE and on huge pages.
//!
//! The test program `sandbox` of the crate `sterna` has the cases. Most hosts have no RDMA device and reserve no huge
//! pages, so its tests skip these cases there. Here they must run.

#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::process::Command;
use std::time::SystemTime;

use super::Scenario;
use super::wire::{self, Wire};
use crate::scenarios::Failure;

/// Variable of the test program. If it is set, the program installs no filters and writes all calls into that file.
pub(in crate::lab) const RECORD: &str = "STERNA_RECORD_CALLS";
/// Huge pages of 2 MiB: for the two guests of a case, 8 MiB each, and for those of the previous case until they are freed.
const HUGE_PAGES: u32 = 16;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        Scenario::short("sandbox: rdma makes exactly the calls of the table", rdma),
        Scenario::short("sandbox: huge pages make exactly the calls of the table", huge_pages),
    ]
}

fn rdma() -> Result<(), Failure> {
    // Its end restores the packets of the wire, which the last case cuts.
    let _wire = Wire::with("pfifo")?;
    let cut = wire::cut_command();
    run("rdma::", &[("STERNA_TEST_RDMA_ADDRESS", wire::ADDRESSES[1]), ("STERNA_TEST_RDMA_CUT", &cut)])
}

fn huge_pages() -> Result<(), Failure> {
    let path = "/proc/sys/vm/nr_hugepages";
    std::fs::write(path, HUGE_PAGES.to_string()).map_err(|error| format!("{path}: {error}"))?;
    let result = run("huge::", &[]);
    std::fs::write(path, "0").map_err(|error| format!("{path}: {error}"))?;
    result
}

/// Runs the tests of a subject. At least one must run, and none may be skipped.
fn run(subject: &str, variables: &[(&str, &str)]) -> Result<(), Failure> {
    let program = program()?;
    let done = Command::new(&program)
        .args([subject, "--nocapture", "--test-threads=1"])
        .envs(variables.iter().copied())
        .output()
        .map_err(|error| format!("{}: {error}", program.display()))?;
    let text = [done.stdout, done.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    if let Some(calls) = std::env::var_os(RECORD) {
        let calls = std::fs::read_to_string(calls).unwrap_or_default();
        calls.lines().for_each(|line| println!("LAB call: {line}"));
    }
    let is_run = done.status.success() && !text.contains("SKIPPED") && !text.contains(" 0 passed");
    if is_run {
        return Ok(());
    }
    text.lines().for_each(|line| println!("LAB sandbox: {line}"));
    Err(format!("{subject} of {}: {}", program.display(), done.status))
}

/// The newest build of the test program, in the target directory of this program.
fn program() -> Result<PathBuf, Failure> {
    let here = std::env::current_exe().map_err(|error| error.to_string())?;
    let directory = here.with_file_name("deps");
    let files = std::fs::read_dir(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    let built = files.flatten().filter(|file| {
        let name = file.file_name().to_string_lossy().into_owned();
        name.starts_with("sandbox-") && !name.contains('.')
    });
    let age = |file: &std::fs::DirEntry| {
        file.metadata().and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
    };
    let newest = built.max_by_key(age).map(|file| file.path());
    newest.ok_or_else(|| {
        let directory = directory.display();
        format!("{directory} has no `sandbox`: `cargo test -p sterna --test sandbox --no-run` builds it")
    })
}
