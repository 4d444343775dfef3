//! Fuzzing on the stable toolchain: libFuzzer with the coverage instrumentation of LLVM asked for by hand.
//!
//! The targets are the binaries of `fuzz/`, a workspace of its own because every crate in it is built with
//! these flags. Seeds lie in `fuzz/seeds/NAME` (examples of sterna-wire, sterna-image and sterna-devices make them, most
//! of them out of the golden vectors), what a run finds goes to `fuzz/corpus/NAME`, crashes to `fuzz/artifacts/NAME`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::parts::{Outcome, Parts};
use crate::process::{self, Failure, Result};
use crate::setup;
use crate::workspace::{Metadata, root};

const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// libFuzzer needs inline counters, the table of program counters and traced comparisons.
const RUSTFLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Ccodegen-units=1";

/// `cargo xtask fuzz [TARGET…] [--seconds N]`.
pub fn command(arguments: &[String]) -> std::result::Result<(), Failure> {
    let mut seconds = 60;
    let mut only = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--seconds" => {
                seconds = rest
                    .next()
                    .and_then(|n| n.parse().ok())
                    .filter(|n| *n > 0)
                    .ok_or_else(|| Failure::Usage("--seconds needs a number above 0".into()))?;
            }
            option if option.starts_with('-') => {
                return Err(Failure::Usage(format!("fuzz has no option `{option}`")));
            }
            target => only.push(target.to_owned()),
        }
    }
    let mut parts = Parts::default();
    parts.part("fuzz", || run(&only, Duration::from_secs(seconds)));
    parts.finish()
}

/// Builds the targets and runs each (of those in `only`, if any) for `each`.
pub fn run(only: &[String], each: Duration) -> Result<Outcome> {
    let manifest = root().join("fuzz/Cargo.toml");
    if !manifest.is_file() {
        return Ok(Outcome::Skipped("fuzz/ has no targets".into()));
    }
    if !cfg!(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu")) {
        return Ok(Outcome::Skipped(format!("the flags were tried on {TRIPLE} alone")));
    }
    if let Err(why) = setup::ensure(&[setup::CXX_COMPILER]) {
        return Ok(Outcome::Skipped(format!("no C++ compiler for libFuzzer: {why}")));
    }
    let mut targets: Vec<String> = Metadata::of_members(Some(&manifest))?
        .targets()
        .into_iter()
        .filter(|target| target.kind == "bin")
        .map(|target| target.name)
        .collect();
    targets.sort();
    if let Some(unknown) = only.iter().find(|name| !targets.contains(name)) {
        return Err(format!("there is no fuzz target `{unknown}`; there are {}", targets.join(", ")));
    }
    targets.retain(|name| only.is_empty() || only.contains(name));
    if targets.is_empty() {
        return Err("fuzz/ builds no binary".into());
    }
    seeds()?;
    build(&manifest)?;
    let mut crashed = Vec::new();
    for target in &targets {
        if let Err(why) = one(target, each) {
            crashed.push(why);
        }
    }
    if crashed.is_empty() { Ok(Outcome::Passed) } else { Err(crashed.join("; ")) }
}

fn target_directory() -> PathBuf {
    root().join("fuzz/target")
}

/// Makes the seeds anew, with the programs that there are for it.
fn seeds() -> Result<()> {
    for name in ["fuzz-seeds", "image-seeds", "vfio-user-seeds"] {
        let Some(target) = Metadata::of_members(None)?.target(name) else { continue };
        let mut command = process::cargo();
        command.args(["run", "--quiet", "--package", &target.package, "--example", name, "--"]);
        process::run(command.arg(root().join("fuzz/seeds")))?;
    }
    Ok(())
}

fn build(manifest: &PathBuf) -> Result<()> {
    let mut command = process::cargo();
    command.args(["build", "--release", "--bins", "--target", TRIPLE, "--manifest-path"]).arg(manifest);
    command.arg("--target-dir").arg(target_directory()).env("RUSTFLAGS", RUSTFLAGS);
    process::run(&mut command)
}

/// Bytes; no seed may be longer, or it is cut. A whole image holds pages.
fn longest_input(target: &str) -> u32 {
    if target.starts_with("image") { 131_072 } else { 16_384 }
}

/// libFuzzer would cut a longer seed without a word, and what is left of an image is not one.
fn uncut(seeds: &Path, longest: u32) -> Result<()> {
    let failed = |error: std::io::Error| format!("{}: {error}", seeds.display());
    for entry in std::fs::read_dir(seeds).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let bytes = entry.metadata().map_err(failed)?.len();
        if bytes > u64::from(longest) {
            let seed = entry.path();
            return Err(format!("{} has {bytes} bytes, more than -max_len={longest}", seed.display()));
        }
    }
    Ok(())
}

fn one(target: &str, each: Duration) -> Result<()> {
    let corpus = root().join("fuzz/corpus").join(target);
    let artifacts = root().join("fuzz/artifacts").join(target);
    for directory in [&corpus, &artifacts] {
        std::fs::create_dir_all(directory).map_err(|e| format!("{}: {e}", directory.display()))?;
    }
    let mut command = Command::new(target_directory().join(TRIPLE).join("release").join(target));
    command
        .arg(format!("-max_total_time={}", each.as_secs()))
        .args(["-rss_limit_mb=1024", "-malloc_limit_mb=64", "-timeout=10", "-verbosity=0"])
        .args(["-print_final_stats=1"])
        .arg(format!("-max_len={}", longest_input(target)))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg(corpus);
    let seeds = root().join("fuzz/seeds").join(target);
    if seeds.is_dir() {
        uncut(&seeds, longest_input(target))?;
        command.arg(seeds);
    }
    let ended = command.output().map_err(|error| format!("cannot start {target}: {error}"))?;
    let said = String::from_utf8_lossy(&ended.stderr);
    if !ended.status.success() {
        println!("{said}");
        return Err(format!(
            "{target} found a bug ({}); the input lies in fuzz/artifacts/{target}",
            ended.status
        ));
    }
    let runs = said
        .lines()
        .find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))
        .map_or("?", str::trim);
    println!("fuzz {target}: ok. {runs} inputs in {} s", each.as_secs());
    Ok(())
}
