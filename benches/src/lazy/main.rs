//! Measures the time until a guest from an image runs, and until its memory is complete. It compares
//! `sterna restore --lazy`, `sterna restore`, and QEMU's own load (mapped-ram, multifd 8).
//!
//! - The time starts when a QEMU waits with `-incoming defer`, so QEMU's start is not measured. It ends at
//!   QEMU's event RESUME. Both times are of this host's clock. The commands' own work before (start,
//!   examination of the image) counts.
//! - The guest is a boot sector in a sparse machine. It writes and checks 32 MiB, whatever the machine's
//!   size.
//! - The image is mapped-ram, written by QEMU. `sterna convert` makes the other forms from it (`--forms`).
//!   Images are in the page cache, so that the results do not depend on a disk. QEMU's own load reads
//!   mapped-ram.
//! - With `--forms …,s3` the image is an object in a storage whose answers come 20 ms later.
//! - The variants alternate, so that a machine that is slower for a while is slower for all. The results are
//!   medians.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints its figures")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Parser;
use serde_json::{Value, json};
use sterna_benches::goal::{Bound, Goal};
use sterna_benches::markdown::{self, Measured};
use sterna_benches::s3::Storage;
use sterna_benches::{Failure, goal};
use sterna_interop::{Builder, Qemu, Root, boot_disk};

/// Time limit of every wait.
const PATIENCE: Duration = Duration::from_secs(300);
/// Memory for which the boot sector is built, MiB. The guest touches half of it.
const SECTOR_MIB: u64 = 64;
/// Goal for the first instruction with `restore --lazy`, milliseconds; from an object storage.
const FIRST: f64 = 150.0;
const FIRST_FROM_S3: f64 = 250.0;
/// How much later the object storage's answers come.
const DELAY: Duration = Duration::from_millis(20);
const S3: &str = "s3";
const MAPPED: &str = "mapped-ram";
const HEAD: &str =
    "| RAM | form | way | first instruction, ms | all memory, s |\n| --- | --- | --- | --- | --- |";

/// Measures the time to the first instruction.
#[derive(Parser)]
struct Args {
    /// RAM of the machine, GiB.
    #[arg(long, value_delimiter = ',', default_value = "1,4,16")]
    gib: Vec<u64>,
    /// Runs of each variant.
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// Forms of the image for `restore --lazy`, as `sterna convert --format` names them; `s3`: Sterna's form in an object storage.
    #[arg(long, value_delimiter = ',', default_value = "mapped-ram,libvirt-sparse,sterna,s3")]
    forms: Vec<String>,
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Lazy,
    Restore,
    Qemu,
}

struct Row {
    gib: u64,
    form: String,
    way: Way,
    first: f64,
    all: f64,
}

/// Seconds until the first instruction, and until all memory is loaded.
type Times = (f64, f64);

fn main() {
    let args = Args::parse();
    if let Err(why) = run(&args) {
        eprintln!("{why}");
        std::process::exit(1);
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("bench lazy") else { return Ok(()) };
    println!("{HEAD}");
    let mut rows = Vec::new();
    let storage = Storage::start();
    for gib in &args.gib {
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        let builder = machine(&root, *gib, directory.path())?;
        let image = save(&builder, directory.path())?;
        let mut ways = Vec::new();
        for form in &args.forms {
            ways.push((Way::Lazy, form.as_str(), converted(&args.sterna, &storage, &image, form)?));
        }
        storage.delay(DELAY);
        ways.push((Way::Restore, MAPPED, image.clone()));
        ways.push((Way::Qemu, MAPPED, image));
        let mut measured: Vec<Vec<Times>> = vec![Vec::new(); ways.len()];
        for _ in 0..args.runs.max(1) {
            for ((way, _, image), times) in ways.iter().zip(&mut measured) {
                times.push(measure(*way, &args.sterna, &storage, &builder, image)?);
            }
        }
        storage.delay(Duration::ZERO);
        for ((way, form, _), times) in ways.iter().zip(&measured) {
            let (first, all) = (median(times.iter().map(|it| it.0)), median(times.iter().map(|it| it.1)));
            let row = Row { gib: *gib, form: (*form).to_owned(), way: *way, first, all };
            println!("{}", row.text());
            rows.push(row);
        }
    }
    write(args, &rows)
}

fn write(args: &Args, rows: &[Row]) -> Result<(), Failure> {
    let lazy = rows.iter().filter(|row| row.way == Way::Lazy);
    let goals = lazy.map(|row| {
        let qemu = rows.iter().find(|other| other.way == Way::Qemu && other.gib == row.gib);
        let beside = qemu.map_or_else(String::new, |qemu| format!("QEMU's load {:.0}", qemu.first * 1e3));
        let what = format!("{} GiB, {}: first instruction, ms after QEMU's own start", row.gib, row.form);
        let most = if row.form == S3 { FIRST_FROM_S3 } else { FIRST };
        Goal::of(&what, row.first * 1e3, &beside, Bound::AtMost(most))
    });
    let goals = goal::table(&goals.collect::<Vec<_>>());
    println!("\n{goals}");
    if let Some(file) = &args.json {
        let all: Value = rows.iter().map(Row::value).collect();
        std::fs::write(file, format!("{all:#}\n")).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    if let Some(file) = &args.markdown {
        let lines: Vec<String> = rows.iter().map(|row| row.text() + "\n").collect();
        let text = format!("{goals}\n{HEAD}\n{}", lines.concat());
        let text = markdown::document(&Measured::now("lazy"), &text);
        std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}

impl Way {
    fn word(self) -> &'static str {
        match self {
            Self::Lazy => "restore --lazy",
            Self::Restore => "sterna restore",
            Self::Qemu => "QEMU's load",
        }
    }
}

impl Row {
    fn text(&self) -> String {
        let (first, all) = (self.first * 1e3, self.all);
        format!("| {} GiB | {} | {} | {first:.1} | {all:.2} |", self.gib, self.form, self.way.word())
    }

    fn value(&self) -> Value {
        json!({
            "gib": self.gib, "form": self.form, "way": self.way.word(), "first_instruction": self.first,
            "all_memory": self.all,
        })
    }
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

/// The image in that form, converted if necessary.
fn converted(sterna: &Path, storage: &Storage, image: &Path, form: &str) -> Result<PathBuf, Failure> {
    if form == MAPPED {
        return Ok(image.to_owned());
    }
    let to = if form == S3 { Storage::address("guest").into() } else { image.with_file_name(form) };
    let format = if form == S3 { "sterna" } else { form };
    let mut command = Command::new(sterna);
    command.arg("convert").arg(image).arg(&to).args(["--force", "--format", format]);
    if form.starts_with("libvirt") {
        let xml = image.with_file_name("xml");
        std::fs::write(&xml, "<domain type='kvm'><name>guest</name></domain>\n")
            .map_err(|error| format!("{}: {error}", xml.display()))?;
        command.arg("--xml").arg(xml);
    }
    let output = storage.tell(&mut command).output();
    let output = output.map_err(|error| format!("{}: {error}", sterna.display()))?;
    if output.status.success() { Ok(to) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

fn measure(
    way: Way,
    sterna: &Path,
    storage: &Storage,
    builder: &Builder,
    image: &Path,
) -> Result<Times, Failure> {
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
        let output = storage.tell(&mut command).output();
        let output = output.map_err(|error| format!("{}: {error}", sterna.display()))?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
    }
    let all = began.elapsed().as_secs_f64();
    let first = resumed(&mut target)?.saturating_sub(clock).as_secs_f64();
    // A line of the guest proves that it runs and has checked its memory.
    target.wait_for_ticks(1)?;
    Ok((first, all))
}

/// Time at which the guest started to run, by the host's clock.
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
