//! Measures saves that do not stop the guest.
//!
//! - The guest is `sterna run`, in the KVM machine if this host has KVM. All of its RAM is random bytes.
//! - **Pause** is the VM's own measurement, for a guest that writes all of its memory at a given rate.
//! - **Increment**: the guest writes 1 % of its memory again and again. The first image of `sterna snapshot` is whole, and each
//!   further one is compared with it in space and time.
//! - After each part the guest checks all of its memory.
#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Parser;
use serde_json::{Value, json};
use sterna_benches::goal::{Bound, Goal};
use sterna_benches::machines::Lab;
use sterna_benches::markdown::{self, Measured};
use sterna_benches::peer::Peer;
use sterna_benches::{Failure, goal};

/// The longest pause, milliseconds.
const PAUSE: f64 = 10.0;
/// Space and time of an increment, percent of a whole image's.
const SPACE: f64 = 1.5;
const TIME: f64 = 5.0;

/// Measures the pause of a live save, and the space and time of increments.
#[derive(Parser)]
struct Args {
    /// RAM of the guest, MiB.
    #[arg(long, default_value_t = 1024)]
    ram: u64,
    /// Pages that the guest writes per second while it is saved.
    #[arg(long, default_value_t = 50_000)]
    rate: u64,
    /// Number of saves, and of increments.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// Machine of the guest: auto, kvm or process.
    #[arg(long, default_value = "auto")]
    machine: String,
    /// Directory of the images [default: the directory for temporary files].
    #[arg(long)]
    directory: Option<PathBuf>,
    /// The `sterna` command to measure.
    #[arg(long, default_value = "sterna")]
    sterna: PathBuf,
    /// Write the rows as JSON to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write goals and rows to this file, in the form of `benches/RESULTS.md`.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

fn main() -> std::process::ExitCode {
    sterna_benches::exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Failure> {
    let lab = Lab { root: None, sterna: args.sterna.clone(), kvm: false, namespace: None };
    let base = args.directory.clone().unwrap_or_else(std::env::temp_dir);
    let directory = tempfile::tempdir_in(&base).map_err(|error| format!("{}: {error}", base.display()))?;
    let (pauses, saves) = pauses(&lab, args, directory.path())?;
    let snapshots = increments(&lab, args, directory.path())?;
    let whole = &snapshots[0];
    let of = |member: &str| -> Vec<f64> { snapshots.iter().filter_map(|row| row[member].as_f64()).collect() };
    let percent = |member: &str| -> f64 {
        let values = of(member);
        100.0 * median(&values[1..]) / values[0]
    };
    let ram = args.ram;
    let milliseconds = 1000.0 * median(&pauses);
    let worst = 1000.0 * pauses.iter().copied().fold(0.0, f64::max);
    let goals = [
        Goal::of(
            &format!("live save of {ram} MiB, {} pages written per second: longest pause, ms", args.rate),
            worst,
            &format!("median {milliseconds:.2}, {} saves", pauses.len()),
            Bound::AtMost(PAUSE),
        ),
        Goal::of(
            "increment after 1 % of the pages changed: space, percent of a whole image",
            percent("file_bytes"),
            &format!("{:.0} pages", median(&of("pages")[1..])),
            Bound::AtMost(SPACE),
        ),
        Goal::of(
            "increment after 1 % of the pages changed: time, percent of a whole image",
            percent("total_time"),
            &format!("whole {:.2} s", whole["total_time"].as_f64().unwrap_or(f64::NAN)),
            Bound::AtMost(TIME),
        ),
    ];
    let goals = goal::table(&goals);
    println!("{goals}");
    if let Some(file) = &args.json {
        let all =
            json!({"schema": "sterna-bench-live", "version": 1, "saves": saves, "snapshots": snapshots});
        std::fs::write(file, format!("{all:#}\n")).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    if let Some(file) = &args.markdown {
        let text = markdown::document(&Measured::now("live"), &goals);
        std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}

/// The pauses of saves of a guest that writes all of its memory, in seconds.
fn pauses(lab: &Lab, args: &Args, directory: &Path) -> Result<(Vec<f64>, Vec<Value>), Failure> {
    let mut guest = start(lab, args, &[format!("--rate={}", args.rate), "--pattern=random".to_owned()])?;
    let image = directory.join("live.sterna");
    let (mut pauses, mut saves) = (Vec::new(), Vec::new());
    for _ in 0..args.runs {
        let image = image.to_string_lossy();
        let arguments = ["save", "--live", "--force", "--json", "--level", "0", &address(&guest), &image];
        let saved: Value = parse(&sterna(args, &arguments)?)?;
        pauses.push(saved["pause"].as_f64().ok_or("the save tells no pause")?);
        saves.push(saved);
    }
    check(&mut guest)?;
    std::fs::remove_file(image).map_err(|error| error.to_string())?;
    Ok((pauses, saves))
}

/// The lines of a series: the first image is whole.
fn increments(lab: &Lab, args: &Args, directory: &Path) -> Result<Vec<Value>, Failure> {
    // Each page of the working set is written within an interval.
    let part = (args.ram / 100).max(1);
    let load = [format!("--rate={}", part * 256 * 2), format!("--working-set={part}M")];
    let mut guest = start(lab, args, &load)?;
    let store = format!("store:{}", directory.join("store").display());
    let count = (args.runs + 1).to_string();
    let arguments = ["snapshot", "--json", "--every", "2s", "--count", &count, &address(&guest), &store];
    let text = sterna(args, &arguments)?;
    check(&mut guest)?;
    text.lines().map(parse).collect()
}

fn start(lab: &Lab, args: &Args, load: &[String]) -> Result<Peer, Failure> {
    let mut arguments = vec![format!("--machine={}", args.machine), format!("--ram={}M", args.ram)];
    arguments.extend_from_slice(load);
    lab.start_tide(arguments)
}

/// The monitor's socket, which serves several clients at once.
fn address(guest: &Peer) -> String {
    format!("unix:{}", guest.directory().join("qmp").display())
}

fn sterna(args: &Args, arguments: &[&str]) -> Result<String, Failure> {
    let output = Command::new(&args.sterna).args(arguments).output();
    let output = output.map_err(|error| format!("{}: {error}", args.sterna.display()))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("{arguments:?}: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

fn parse(text: &str) -> Result<Value, Failure> {
    serde_json::from_str(text).map_err(|error| format!("{error}: {text}"))
}

fn check(guest: &mut Peer) -> Result<(), Failure> {
    let verdict = guest.execute("x-sterna-check-guest", Value::Null)?;
    match verdict["consistent"] == true {
        true => Ok(()),
        false => Err(format!("the guest's memory is wrong: {verdict}")),
    }
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
