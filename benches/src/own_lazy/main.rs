//! Measures the time from the start of `sterna run --restore` to the guest's first instruction, and until its memory is complete.
//!
//! - The guest is code of a few bytes that writes to the serial port without an end, and data after it. The time ends when the
//!   first byte is in the file of the serial port. It begins before the process is made, so everything that the command does
//!   counts.
//! - The data is half compressible, and is in the first part of RAM. The rest of RAM is zero.
//! - The images are in the page cache. One is an object in a storage whose answers come 20 ms later. The variants alternate. The results are medians.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints its figures")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::{Value, json};
use sterna_benches::goal;
use sterna_benches::goal::{Bound, Goal};
use sterna_benches::s3::Storage;
use sterna_qmp::{Client, Endpoint};

type Failure = Box<dyn std::error::Error>;

/// Limit of every wait.
const PATIENCE: Duration = Duration::from_secs(300);
/// Goal for the first instruction of a lazily restored guest, in milliseconds.
const FIRST: f64 = 50.0;
/// The same from an object storage.
const FIRST_FROM_S3: f64 = 250.0;
/// How much later the object storage's answers come.
const DELAY: Duration = Duration::from_millis(20);
/// `mov dx, 0x3f8; mov al, 'x'; again: out dx, al; mov ecx, 1 << 9; spin: dec ecx; jnz spin; jmp again`.
const CODE: &[u8] = &[
    0x66, 0xba, 0xf8, 0x03, 0xb0, 0x78, 0xee, 0xb9, 0x00, 0x02, 0x00, 0x00, 0xff, 0xc9, 0x75, 0xfc, 0xeb,
    0xf4,
];

const LAZY: &[&str] = &["--lazy", "--fill-rate=max"];

/// Measures the time to the first instruction of Sterna's own VM.
#[derive(Parser)]
struct Args {
    /// RAM of the machine, MiB.
    #[arg(long, value_delimiter = ',', default_value = "1024,4096,16384")]
    mib: Vec<u64>,
    /// Part of the RAM that has content, MiB.
    #[arg(long, default_value_t = 256)]
    content: u64,
    /// Runs of each variant.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// The `sterna` command to measure.
    #[arg(long, default_value = "sterna")]
    sterna: PathBuf,
    /// Write the rows as JSON to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// An image, and how it is restored.
struct Variant {
    name: &'static str,
    image: PathBuf,
    options: &'static [&'static str],
    /// Seconds to the first instruction, and until the memory is complete.
    times: Vec<(f64, f64)>,
}

fn main() -> std::process::ExitCode {
    sterna_benches::exit(run(&Args::parse()).map_err(|error| error.to_string()))
}

fn run(args: &Args) -> Result<(), Failure> {
    if std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_err() {
        println!("SKIPPED own VM: /dev/kvm cannot be used");
        return Ok(());
    }
    println!("| own VM: RAM, image | first instruction, ms | all memory, s |\n| --- | --- | --- |");
    let (mut goals, mut values) = (Vec::new(), Vec::new());
    let storage = Storage::start();
    for mib in &args.mib {
        let directory = tempfile::tempdir()?;
        let mut variants = images(args, &storage, *mib, directory.path())?;
        storage.delay(DELAY);
        for _ in 0..args.runs.max(1) {
            for variant in &mut variants {
                let times = measure(args, &storage, *mib, directory.path(), variant)?;
                variant.times.push(times);
            }
        }
        storage.delay(Duration::ZERO);
        for variant in variants {
            let first = median(variant.times.iter().map(|times| times.0)) * 1e3;
            let all = median(variant.times.iter().map(|times| times.1));
            println!("| {mib} MiB, {} | {first:.1} | {all:.2} |", variant.name);
            values.push(json!({"ram_mib": mib, "image": variant.name, "first_ms": first, "all_s": all}));
            let bound = match (variant.options.is_empty(), variant.image.starts_with("s3:")) {
                (true, _) => Bound::Stated,
                (false, true) => Bound::AtMost(FIRST_FROM_S3),
                (false, false) => Bound::AtMost(FIRST),
            };
            let what = format!("own VM, {mib} MiB, {}: first instruction, ms", variant.name);
            goals.push(Goal::of(&what, first, "", bound));
        }
    }
    println!("\n{}", goal::table(&goals));
    if let Some(file) = &args.json {
        std::fs::write(file, format!("{:#}\n", Value::from(values)))?;
    }
    Ok(())
}

/// Saves a guest, and converts the image.
fn images(args: &Args, storage: &Storage, mib: u64, directory: &Path) -> Result<Vec<Variant>, Failure> {
    let code = directory.join("code");
    let content = args.content.min(mib / 2);
    let mut bytes = CODE.to_vec();
    bytes.resize(4096, 0);
    let mut random = fastrand::Rng::with_seed(1);
    while (bytes.len() as u64) < content << 20 {
        // Half of each page is random, the rest repeats.
        let mut page = [0x5a; 4096];
        random.fill(&mut page[..2048]);
        bytes.extend_from_slice(&page);
    }
    std::fs::write(&code, bytes)?;
    let guest = format!("flat:{}", code.display());
    let (mut vm, mut client, _) = start(args, storage, mib, directory, &["--guest", &guest])?;
    let stored = directory.join("vm.sterna");
    let saved = Command::new(&args.sterna).arg("save").arg(directory.join("qmp")).arg(&stored).output()?;
    if !saved.status.success() {
        return Err(format!("save: {}", String::from_utf8_lossy(&saved.stderr)).into());
    }
    let _ = client.execute("quit", Value::Null);
    vm.wait()?;
    let convert = |image: PathBuf, options: &[&str]| -> Result<PathBuf, Failure> {
        let mut command = Command::new(&args.sterna);
        let output =
            storage.tell(&mut command).arg("convert").arg(&stored).arg(&image).args(options).output()?;
        match output.status.success() {
            true => Ok(image),
            false => Err(format!("convert: {}", String::from_utf8_lossy(&output.stderr)).into()),
        }
    };
    let raw = convert(directory.join("raw.sterna"), &["--level", "0"])?;
    let mapped = convert(directory.join("vm.img"), &["--format", "mapped-ram"])?;
    let remote = convert(Storage::address("vm").into(), &["--force"])?;
    let variant =
        |name, image: &Path, options| Variant { name, image: image.to_owned(), options, times: Vec::new() };
    Ok(vec![
        variant("compressed, lazy", &stored, LAZY),
        variant("not compressed, lazy", &raw, LAZY),
        variant("mapped-ram, lazy", &mapped, LAZY),
        variant("compressed, in S3, lazy", &remote, LAZY),
        variant("compressed, all memory first", &stored, &[]),
        variant("not compressed, all memory first", &raw, &[]),
        variant("mapped-ram, all memory first", &mapped, &[]),
    ])
}

/// Starts a VM. Returns it with its monitor, and the time until the guest has written its first byte.
fn start(
    args: &Args,
    storage: &Storage,
    mib: u64,
    directory: &Path,
    more: &[&str],
) -> Result<(Child, Client, f64), Failure> {
    let (qmp, serial) = (directory.join("qmp"), directory.join("serial"));
    for file in [&qmp, &serial] {
        let _ = std::fs::remove_file(file);
    }
    let mut command = Command::new(&args.sterna);
    storage.tell(&mut command).args(["run", "--machine=kvm"]).arg(format!("--ram={mib}M"));
    command.arg(format!("--exit-with-parent={}", std::process::id()));
    command.arg(format!("--qmp=unix:{}", qmp.display())).arg(format!("--serial={}", serial.display()));
    command.args(more).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let began = Instant::now();
    let mut child = command.spawn()?;
    while std::fs::metadata(&serial).map_or(0, |file| file.len()) == 0 {
        if child.try_wait()?.is_some() || began.elapsed() > PATIENCE {
            let _ = child.kill();
            return Err(format!("the guest does not start: {more:?}").into());
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    let first = began.elapsed().as_secs_f64();
    let client = Client::connect(&Endpoint::Unix(qmp), PATIENCE)?;
    Ok((child, client, first))
}

fn measure(
    args: &Args,
    storage: &Storage,
    mib: u64,
    directory: &Path,
    variant: &Variant,
) -> Result<(f64, f64), Failure> {
    let restore = format!("--restore={}", variant.image.display());
    let options = [&[restore.as_str()], variant.options].concat();
    let (mut vm, mut client, first) = start(args, storage, mib, directory, &options)?;
    let began = Instant::now();
    loop {
        let restore = client.execute("x-sterna-query-restore", Value::Null)?;
        match restore["status"].as_str() {
            Some("completed") => break,
            // The guest can run before the command notes it.
            Some("loading" | "active") if began.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(5))
            }
            _ => return Err(format!("{}: {restore}", variant.name).into()),
        }
    }
    let all = first + began.elapsed().as_secs_f64();
    let _ = client.execute("quit", Value::Null);
    vm.wait()?;
    Ok((first, all))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
