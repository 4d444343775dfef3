//! How long a guest in an image takes until its first instruction, and until all of its memory is there: `sterna restore --lazy`,
//! `sterna restore`, and QEMU's own load (mapped-ram, multifd 8), beside each other.
//!
//! - The clock begins when a QEMU has come up and waits with `-incoming defer`, so its own start-up is in no figure. It ends at QEMU's
//!   event RESUME; both are of this host's clock. What the commands do before (their own start, examining the image) counts.
//! - The guest is a boot sector in a sparse machine: it writes and checks 32 MiB, whatever the machine's size.
//! - Images are mapped-ram, as QEMU wrote them, and in the page cache, so the figures are those of the work and not of a disk.
//! - The ways take turns, so that a machine that is slower for a while is slower for all. Medians.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints its figures")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Parser;
use serde_json::{Value, json};
use sterna_interop::{Builder, Qemu, Root, boot_disk};

/// What went wrong, in words.
type Failure = String;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(300);
/// Memory that the guest touches, MiB: half of what its sector is built for.
const SECTOR_MIB: u64 = 64;

/// Measures the time to the first instruction.
#[derive(Parser)]
struct Args {
    /// RAM of the machine, GiB.
    #[arg(long, value_delimiter = ',', default_value = "1,4,16")]
    gib: Vec<u64>,
    /// Runs of each way.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// The `sterna` command.
    #[arg(long, default_value = "sterna")]
    sterna: PathBuf,
    /// Write the rows as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Lazy,
    Restore,
    Qemu,
}

const WAYS: [(Way, &str); 3] =
    [(Way::Lazy, "restore --lazy"), (Way::Restore, "sterna restore"), (Way::Qemu, "QEMU's load")];

/// Seconds until the first instruction, and until all memory was there.
type Times = (f64, f64);

fn main() {
    let args = Args::parse();
    if let Err(why) = run(&args) {
        eprintln!("{why}");
        std::process::exit(1);
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    let root = Root::qemu_for("the bench lazy").ok_or("there is no QEMU")?;
    println!("| RAM | way | first instruction, ms | all memory, s |\n| --- | --- | --- | --- |");
    let mut rows = Vec::new();
    for gib in &args.gib {
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        let builder = machine(&root, *gib, directory.path())?;
        let image = save(&builder, directory.path())?;
        let mut measured: [Vec<Times>; 3] = Default::default();
        for _ in 0..args.runs {
            for (index, (way, _)) in WAYS.iter().enumerate() {
                measured[index].push(measure(*way, &args.sterna, &builder, &image)?);
            }
        }
        for ((_, name), times) in WAYS.iter().zip(&measured) {
            let (first, all) = (median(times.iter().map(|it| it.0)), median(times.iter().map(|it| it.1)));
            println!("| {gib} GiB | {name} | {:.1} | {all:.2} |", first * 1e3);
            rows.push(json!({"gib": gib, "way": name, "first_instruction": first, "all_memory": all}));
        }
    }
    let Some(path) = &args.json else { return Ok(()) };
    std::fs::write(path, format!("{:#}\n", Value::from(rows)))
        .map_err(|error| format!("{}: {error}", path.display()))
}

fn machine(root: &Root, gib: u64, directory: &Path) -> Result<Builder, Failure> {
    let disk = directory.join("disk");
    boot_disk(&disk, SECTOR_MIB)?;
    let drive = format!("file={},format=raw,if=none,id=boot,snapshot=on", disk.display());
    let builder = Qemu::builder(root).machine("pc").memory_mib(gib << 10).kvm_if_any();
    Ok(builder.args(&["-drive", &drive, "-device", "ide-hd,drive=boot,bootindex=0"]))
}

fn save(builder: &Builder, directory: &Path) -> Result<PathBuf, Failure> {
    let mut source = builder.clone().spawn()?;
    source.wait_for_ticks(2)?;
    let image = directory.join("image");
    source.capabilities(&["mapped-ram"])?;
    source.migrate(&format!("file:{}", image.display()))?;
    Ok(image)
}

fn measure(way: Way, sterna: &Path, builder: &Builder, image: &Path) -> Result<Times, Failure> {
    let mut target = builder.clone().incoming_defer().spawn()?;
    let (clock, began) = (now(), Instant::now());
    if way == Way::Qemu {
        target.capabilities(&["mapped-ram", "multifd"])?;
        target.parameters(json!({ "multifd-channels": 8 }))?;
        target.incoming(&format!("file:{}", image.display()))?;
    } else {
        let mut command = Command::new(sterna);
        command.arg("restore").arg(image).arg(target.operator_socket()).args(["--json", "--no-direct-io"]);
        command.args((way == Way::Lazy).then_some("--lazy"));
        let output = command.output().map_err(|error| format!("{}: {error}", sterna.display()))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
    }
    let all = began.elapsed().as_secs_f64();
    let first = resumed(&mut target)?.saturating_sub(clock).as_secs_f64();
    // What runs has its memory.
    target.wait_for_ticks(1)?;
    Ok((first, all))
}

/// When the guest began to run, by the host's clock.
fn resumed(target: &mut Qemu) -> Result<Duration, Failure> {
    loop {
        let event = target.qmp().next_event(PATIENCE).map_err(|error| error.to_string())?;
        match event {
            Some(event) if event.name == "RESUME" => return Ok(event.timestamp),
            Some(_) => {}
            None => return Err("the guest does not begin to run".into()),
        }
    }
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
