//! Runs libFuzzer on the stable toolchain.
//!
//! Its binaries are in `fuzz/libfuzzer`. That is a separate workspace, because its build
//! instruments Sterna's crates (`fuzz/libfuzzer/rustc`). New inputs of a run stay in
//! `fuzz/corpus/TARGET`. Those that add coverage are packed into `fuzz/stored`, which is committed.
//! Inputs that crash are in `fuzz/artifacts/TARGET`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::ledger::{Ledger, Run};
use super::{Request, SEEDS, directory};
use crate::parts::Outcome;
use crate::process::{self, Result};
use crate::setup;
use crate::workspace::{Metadata, root};

const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// libFuzzer needs inline counters, the table of program counters and traced comparisons.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Ccodegen-units=1";

/// Limits of one input: resident memory and one allocation in MiB, time in seconds.
const LIMITS: [&str; 3] = ["-rss_limit_mb=1024", "-malloc_limit_mb=64", "-timeout=10"];

/// The kernel reports processor time to programs in hundredths of a second.
const TICKS: u64 = 100;
const PAUSE: Duration = Duration::from_millis(100);

/// Runs each requested target, adds the time to the ledger, and merges the new inputs.
pub fn explore(request: &Request) -> Result<Outcome> {
    match prepare(request)? {
        Ok(targets) => each(request, &targets, |target, longest| {
            one(target, longest, request.seconds)?;
            merge_one(target, longest)
        }),
        Err(skipped) => Ok(skipped),
    }
}

/// Merges the inputs that earlier runs found.
pub fn merge(request: &Request) -> Result<Outcome> {
    match prepare(request)? {
        Ok(targets) => each(request, &targets, merge_one),
        Err(skipped) => Ok(skipped),
    }
}

/// Builds everything. Returns the requested targets, each with the length of its longest input in
/// bytes.
fn prepare(request: &Request) -> Result<std::result::Result<BTreeMap<String, usize>, Outcome>> {
    let manifest = root().join("fuzz/libfuzzer/Cargo.toml");
    if !cfg!(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu")) {
        return Ok(Err(Outcome::Skipped(format!("the flags were tried on {TRIPLE} alone"))));
    }
    if let Err(why) = setup::ensure(&[setup::CXX_COMPILER]) {
        return Ok(Err(Outcome::Skipped(format!("no C++ compiler for libFuzzer: {why}"))));
    }
    let listed = process::output(runner().arg("list"))?;
    let mut targets: BTreeMap<String, usize> = listed
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(name, longest)| Some((name.to_owned(), longest.parse().ok()?)))
        .collect();
    let names: Vec<&str> = targets.keys().map(String::as_str).collect();
    if let Some(unknown) = request.only.iter().find(|name| !targets.contains_key(*name)) {
        return Err(format!("there is no fuzz target `{unknown}`; there are {}", names.join(", ")));
    }
    let binaries = Metadata::of_members(Some(&manifest))?.targets();
    if let Some(lacking) = names.iter().find(|name| !binaries.iter().any(|binary| binary.name == **name)) {
        return Err(format!("fuzz/libfuzzer has no binary for the target `{lacking}`"));
    }
    targets.retain(|name, _| request.only.is_empty() || request.only.contains(name));
    for (example, package) in SEEDS {
        let mut command = process::cargo();
        command.args(["run", "--quiet", "--package", package, "--example", example, "--"]);
        process::run(command.arg(root().join("fuzz/seeds")))?;
    }
    for (target, longest) in &targets {
        process::run(runner().args(["unpack", target]).arg(fresh("stored-now", target)?))?;
        uncut(&directory("seeds", target), *longest)?;
    }
    let mut command = process::cargo();
    command.args(["build", "--release", "--bins", "--target", TRIPLE, "--manifest-path"]).arg(manifest);
    command.arg("--target-dir").arg(root().join("fuzz/target")).env("STERNA_FUZZ_FLAGS", FLAGS);
    command.env("RUSTC_WRAPPER", root().join("fuzz/libfuzzer/rustc"));
    process::run(&mut command)?;
    Ok(Ok(targets))
}

/// A call of the program `sterna-fuzz`.
fn runner() -> Command {
    let mut command = process::cargo();
    command.args(["run", "--quiet", "--package", "sterna-fuzz", "--"]);
    command
}

/// Creates the empty directory `fuzz/target/NAME/TARGET`.
fn fresh(name: &str, target: &str) -> Result<PathBuf> {
    let directory = directory("target", name).join(target);
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    Ok(directory)
}

/// Fails if a seed is longer than the limit.
///
/// libFuzzer would cut it silently, and a cut image is no image.
fn uncut(seeds: &Path, longest: usize) -> Result<()> {
    let failed = |error: std::io::Error| format!("{}: {error}", seeds.display());
    let Ok(entries) = fs::read_dir(seeds) else { return Ok(()) };
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let bytes = entry.metadata().map_err(failed)?.len();
        if bytes > longest as u64 {
            let seed = entry.path();
            return Err(format!("{} has {bytes} bytes, more than -max_len={longest}", seed.display()));
        }
    }
    Ok(())
}

/// Calls `work` for every target, with the requested number of targets in parallel.
fn each(
    request: &Request,
    targets: &BTreeMap<String, usize>,
    work: impl Fn(&str, usize) -> Result<()> + Sync,
) -> Result<Outcome> {
    let waiting = Mutex::new(targets.iter());
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..request.jobs {
            scope.spawn(|| {
                loop {
                    let next = waiting.lock().ok().and_then(|mut waiting| waiting.next());
                    let Some((target, longest)) = next else { return };
                    if let Err(why) = work(target, *longest)
                        && let Ok(mut failed) = failed.lock()
                    {
                        failed.push(why);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_default();
    if failed.is_empty() { Ok(Outcome::Passed) } else { Err(failed.join("; ")) }
}

fn libfuzzer(target: &str, longest: usize) -> Command {
    let mut command = Command::new(root().join("fuzz/target").join(TRIPLE).join("release").join(target));
    command.args(LIMITS).arg(format!("-max_len={longest}")).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Runs a target for this number of seconds.
fn one(target: &str, longest: usize, seconds: u64) -> Result<()> {
    let (corpus, artifacts) = (directory("corpus", target), directory("artifacts", target));
    for directory in [&corpus, &artifacts] {
        fs::create_dir_all(directory).map_err(|e| format!("{}: {e}", directory.display()))?;
    }
    let log = fresh("logs", target)?.join("log");
    let to_log = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
    let mut command = libfuzzer(target, longest);
    command.arg(format!("-max_total_time={seconds}")).args(["-verbosity=0", "-print_final_stats=1"]);
    command.arg(format!("-artifact_prefix={}/", artifacts.display())).arg(&corpus);
    command.args(others(target)).stderr(to_log);
    let began = Instant::now();
    let mut child = command.spawn().map_err(|error| format!("cannot start {target}: {error}"))?;
    let (status, processor_seconds) =
        wait(&mut child).map_err(|error| format!("cannot wait for {target}: {error}"))?;
    let said = fs::read(&log).map_err(|error| format!("{}: {error}", log.display()))?;
    let said = String::from_utf8_lossy(&said);
    let inputs = executed(&said);
    let run = Run { seconds: began.elapsed().as_secs(), processor_seconds, inputs };
    Ledger::add(target, run)?;
    if !status.success() {
        println!("{said}");
        return Err(format!("{target} found a bug ({status}); the input lies in {}", artifacts.display()));
    }
    println!("fuzz {target}: ok. {inputs} inputs in {} s, {processor_seconds} s of a processor", run.seconds);
    Ok(())
}

/// Existing directories with further inputs of the target.
fn others(target: &str) -> Vec<PathBuf> {
    let all = [directory("target", "stored-now").join(target), directory("seeds", target)];
    all.into_iter().filter(|directory| directory.is_dir()).collect()
}

/// The number of executed inputs in libFuzzer's last lines.
fn executed(said: &str) -> u64 {
    let number = said.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    number.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// Waits for the child's end. Returns its exit status and its processor time in seconds.
fn wait(child: &mut Child) -> std::io::Result<(ExitStatus, u64)> {
    let mut ticks = 0;
    loop {
        // The kernel reports no processor time of a process that has ended, so the last value is
        // kept.
        ticks = processor_ticks(child.id()).unwrap_or(ticks);
        if let Some(status) = child.try_wait()? {
            return Ok((status, ticks / TICKS));
        }
        std::thread::sleep(PAUSE);
    }
}

/// User and system time of a process, in ticks.
fn processor_ticks(process: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The process name in parentheses may contain blanks; the fields after it do not.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// Replaces the stored inputs with the smallest set that has the coverage of all known inputs.
fn merge_one(target: &str, longest: usize) -> Result<()> {
    let merged = fresh("merged", target)?;
    let log = merged.with_extension("log");
    let to_log = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
    let mut command = libfuzzer(target, longest);
    command.arg("-merge=1").arg(&merged);
    let corpus = directory("corpus", target);
    command.args(corpus.is_dir().then_some(corpus)).args(others(target)).stderr(to_log);
    process::run(&mut command).map_err(|why| format!("{why}; see {}", log.display()))?;
    process::run(runner().args(["pack", target]).arg(merged))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executed_reads_the_number_of_inputs() {
        let said = "Done 12 runs in 1 second(s)\nstat::number_of_executed_units: 4711\nstat::average: 1";
        assert_eq!((executed(said), executed("")), (4711, 0));
    }

    #[test]
    fn processor_ticks_of_this_process_grow() {
        let before = processor_ticks(std::process::id()).unwrap();
        let mut number = 1u64;
        while processor_ticks(std::process::id()).unwrap() < before + 2 {
            number = std::hint::black_box(number.wrapping_mul(3));
        }
    }
}
