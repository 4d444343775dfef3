//! The soak: migrations that are cancelled, cut and killed in every state. Afterwards it checks for
//! leftovers.
//!
//! The target `soak` does the work; this file finds it, runs it and passes the number of runs.

use std::process::Command;

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};
use crate::workspace::Metadata;

/// Number of runs of a full soak.
const FULL: u64 = 1000;
/// Number of migrations over RDMA.
const OVER_RDMA: &str = "500";
/// Kinds of runs: the option, the count alone, and the count among all kinds.
const KINDS: [(&str, u64, u64); 6] = [
    // Protections whose primary is a process that is killed.
    ("--kills", FULL, 300),
    // Protections that are disturbed.
    ("--colo", FULL, 300),
    // Migrations in postcopy whose connections break.
    ("--postcopy", FULL, FULL),
    // Precopies that survive a lost connection.
    ("--resumed", 500, 500),
    // Precopies that are cut once and complete.
    ("--cuts", 200, 200),
    // Migrations that are cut at each message of the handover.
    ("--handover", FULL, FULL),
];
/// Number of checkpoints of a protection during which no resource may grow.
const CHECKPOINTS: u64 = 10_000;
/// A test that runs fewer rounds in the suite, and its number of rounds here.
const CEILING: (&str, &str) = ("one_chunk_ceiling_with_stalled_loaders_never_blocks_over_rdma", "1000");

/// `cargo xtask soak [--kills | --colo | --postcopy | --resumed | --cuts | --handover] [--count N] [--seed S]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    let (mut wanted, mut seed) = (None, None);
    let (arguments, alone) = match arguments.split_first() {
        Some((first, rest)) if KINDS.iter().any(|(kind, ..)| kind == first) => (rest, Some(first.as_str())),
        _ => (arguments, None),
    };
    for pair in arguments.chunks(2) {
        let [option, number] = pair else {
            return Err(Failure::Usage(format!("`{}` needs a number", pair[0])));
        };
        let number = number.parse().map_err(|_| Failure::Usage(format!("`{number}` is no number")))?;
        match option.as_str() {
            "--count" => wanted = Some(number),
            "--seed" => seed = Some(number),
            _ => {
                let kinds = KINDS.map(|(kind, ..)| kind).join(", ");
                return Err(Failure::Usage(format!(
                    "soak takes one of {kinds} first, `--count N` and `--seed S`"
                )));
            }
        }
    }
    let mut parts = Parts::default();
    for (kind, usual, among_all) in KINDS {
        let count = match alone {
            Some(alone) if alone == kind => wanted.unwrap_or(usual),
            Some(_) => continue,
            None => among_all,
        };
        parts.part(kind.trim_start_matches('-'), || play(&[kind.to_owned(), count.to_string()], seed));
        if kind == "--colo" {
            parts
                .part("long protection", || play(&["--colo-long".to_owned(), CHECKPOINTS.to_string()], seed));
        }
    }
    if alone.is_some() {
        return parts.finish();
    }
    let count = wanted.unwrap_or(FULL);
    parts.part("soak", || play(&["--count".to_owned(), count.to_string()], seed));
    parts.part("silence", || play(&["--silence".to_owned()], seed));
    parts.part("rdma", || play(&["--rdma".to_owned(), OVER_RDMA.to_owned()], seed));
    parts.part("rdma, devices' streams", || stalled_loaders(seed));
    parts.finish()
}

fn play(arguments: &[String], seed: Option<u64>) -> Result<Outcome> {
    let Some(target) = Metadata::of_members(None)?.target("soak") else {
        return Ok(Outcome::Skipped("no target is called `soak`".into()));
    };
    let mut command = process::cargo();
    let kind = if target.kind == "example" { "--example" } else { "--bin" };
    if !matches!(target.kind.as_str(), "bin" | "example") {
        return Err(format!("`soak` of {} is a {}, not a program", target.package, target.kind));
    }
    command.args(["run", "--quiet", "--release", "--package", &target.package, kind, "soak", "--"]);
    add(&mut command, arguments, seed);
    process::run(&mut command).map(|()| Outcome::Passed)
}

/// A migration with 8 devices, 4 lanes and memory for one chunk, over RDMA.
fn stalled_loaders(seed: Option<u64>) -> Result<Outcome> {
    let (test, rounds) = CEILING;
    let mut command = process::cargo();
    command
        .args(["test", "--quiet", "--package", "sterna", "--test", "leaks", test])
        .env("STERNA_ROUNDS", rounds);
    if let Some(seed) = seed {
        command.env("STERNA_SEED", seed.to_string());
    }
    process::run(&mut command).map(|()| Outcome::Passed)
}

fn add(command: &mut Command, arguments: &[String], seed: Option<u64>) {
    command.args(arguments);
    if let Some(seed) = seed {
        command.args(["--seed", &seed.to_string()]);
    }
}
