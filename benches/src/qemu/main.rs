//! Compares Sterna with QEMU in one run: save, restore and migration of the same RAM on the same machine.
//!
//! - The same code drives both processes over QMP: `sterna run`, and the QEMU of the root that
//!   `cargo xtask roots qemu` builds. RAM is a memfd in both.
//! - Times are an operator's: from the command until the machines' events report the end. Saves are compared
//!   by the time until the image is durable. QEMU does not sync, so the bench syncs and adds that time;
//!   Sterna reports the end only after its sync. Images are dropped from the page cache before the restore.
//! - The guests are stopped, and the bench writes their RAM from outside, so that both contain the same
//!   bytes. RAM of sources and destinations is allocated before (`prealloc=on` in QEMU, `--prealloc` in
//!   Sterna). The reason: memory that is new to a virtual machine costs seconds per GiB. For the same reason,
//!   the page cache gets recycled memory. Destinations with untouched RAM are reported separately.
//! - The machine that received a guest is the next repetition's source. In the warm-up, the received bytes
//!   are compared with the sent ones.
//! - CPU seconds include all threads of all processes that took part, also for the bench's own limits.
//! - Repetitions are interleaved. Results are medians with minimum and maximum; ratios are medians of the
//!   repetitions' ratios.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints its figures")]

mod chain;
mod content;
mod figures;
mod group;
mod image;
mod limits;
mod live;
mod output;
mod plan;
mod schedule;
mod tools;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Parser, ValueEnum};
use content::{Content, Kind as Fill};
use figures::Table;
use group::skipped;
use plan::{Chains, Width};
use schedule::{Importance, Schedule};
use sterna_benches::machines::Lab;
use sterna_benches::markdown::{self, Measured};
use sterna_interop::Root;

/// A description of what failed.
type Failure = String;

/// Times Sterna against QEMU.
#[derive(Parser)]
struct Args {
    /// RAM of the guests, MiB.
    #[arg(long, default_value_t = 1024)]
    ram: u64,
    /// Content of RAM; the first content is used in every setting, the others only in the important ones.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "random,half,zero,linux")]
    contents: Vec<Fill>,
    /// Parts to time.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "live,disk,tmpfs,load")]
    only: Vec<Part>,
    /// Repetitions of the first content; at most 3 for the others.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Count the first repetition as well: for large guests, with which there is time for only one.
    #[arg(long)]
    no_warm_up: bool,
    /// Approximate time limit; repetitions are left out to keep it.
    #[arg(long, default_value_t = 24.0)]
    minutes: f64,
    /// Only the first content, few settings, no tmpfs, 3 repetitions, 5 minutes.
    #[arg(long)]
    quick: bool,
    /// Only rows whose name contains one of these, such as `raw,multifd 2`.
    #[arg(long, value_name = "TEXT,…", value_delimiter = ',')]
    rows: Vec<String>,
    /// Directory on a disk [default: in the target directory].
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Directory on a tmpfs.
    #[arg(long, default_value = "/dev/shm")]
    tmpfs: PathBuf,
    /// The `sterna` to be timed [default: in the directory of this program].
    #[arg(long, overrides_with = "sterna")]
    sterna: Option<PathBuf>,
    /// Run without KVM even if it is available.
    #[arg(long)]
    no_kvm: bool,
    /// Write all results, repetition by repetition.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the tables in Markdown: first rows in the form of benches/RESULTS.md, then every row.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
enum Part {
    /// Migration of an idle guest.
    Live,
    /// Images on the disk.
    Disk,
    /// Images on the tmpfs.
    Tmpfs,
    /// Migration of a guest that writes.
    Load,
}

fn main() {
    let mut args = Args::parse();
    if args.quick {
        args.contents.truncate(1);
        args.only.retain(|part| *part != Part::Tmpfs);
        (args.runs, args.minutes) = (args.runs.min(3), args.minutes.min(5.0));
    }
    if let Err(why) = run(&args) {
        eprintln!("bench qemu: {why}");
        std::process::exit(1);
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    let lab = lab(args)?;
    let disk = scratch(&args.dir.clone().unwrap_or(beside()?))?;
    let tmpfs = scratch(&args.tmpfs)?;
    let tools = tools::tools(&lab, disk.path())?;
    let limit = Duration::from_secs_f64(args.minutes * 60.0);
    let mut schedule = Schedule::new(limit, args.runs, !args.no_warm_up, &groups(args)).only(&args.rows);
    let mut tables = Vec::new();
    if args.only.contains(&Part::Load) {
        let sector = disk.path().join("boot.img");
        match plan::writing(&lab, &sector) {
            Ok(group) => tables.extend(schedule.run(group, Importance::Beside)),
            Err(why) => skipped("the guest that writes", &why),
        }
    }
    for (number, &fill) in args.contents.iter().enumerate() {
        let content = match Content::new(fill, args.ram << 20, lab.root.as_ref(), disk.path()) {
            Ok(content) => content,
            Err(why) => {
                skipped(&format!("content {fill:?}"), &why);
                continue;
            }
        };
        let importance = importance(number);
        let width = match importance {
            Importance::Main if !args.quick => Width::All,
            _ => Width::Few,
        };
        let chains = Chains::new(&lab, &content, width);
        // Fills RAM now, so that the first timing does not. It also determines the number of bytes to copy.
        chains.sterna.source().and_then(|peer| chains.sterna.arrived(peer, false))?;
        let about = format!("{} MiB, {}", args.ram, format!("{fill:?}").to_lowercase());
        if args.only.contains(&Part::Live) {
            let memory = if fill == Fill::Zero { None } else { Some(limits::Memory::new(content.bytes)?) };
            tables.extend(schedule.run(plan::live(&chains, &about, memory.as_ref()), importance));
        }
        for (part, place, medium) in [(Part::Disk, &disk, "disk"), (Part::Tmpfs, &tmpfs, "tmpfs")] {
            if args.only.contains(&part) {
                let about = format!("{about}, {medium}");
                tables.extend(schedule.run(plan::images(&chains, &about, place.path(), &tools), importance));
            }
        }
    }
    report(args, &lab, &tables)
}

/// Importance of the groups that will run, in their order.
fn groups(args: &Args) -> Vec<Importance> {
    let of_content = args.only.iter().filter(|part| **part != Part::Load).count();
    let contents = (0..args.contents.len()).flat_map(|number| vec![importance(number); of_content]);
    args.only.contains(&Part::Load).then_some(Importance::Beside).into_iter().chain(contents).collect()
}

/// The first content is the most important one.
fn importance(number: usize) -> Importance {
    if number == 0 { Importance::Main } else { Importance::Beside }
}

fn lab(args: &Args) -> Result<Lab, Failure> {
    let sterna = args.sterna.clone().unwrap_or(beside()?.join("sterna"));
    if !sterna.is_file() {
        return Err(format!("{} is not there: build it, or name another with --sterna", sterna.display()));
    }
    let kvm = !args.no_kvm && sterna_interop::kvm_for("KVM");
    Ok(Lab { root: Root::qemu_for("all of QEMU's rows"), sterna, kvm, namespace: None })
}

/// The directory of this program.
fn beside() -> Result<PathBuf, Failure> {
    let exe = std::env::current_exe().map_err(|error| error.to_string())?;
    exe.parent().map(Path::to_path_buf).ok_or_else(|| "this program lies nowhere".into())
}

fn scratch(directory: &Path) -> Result<tempfile::TempDir, Failure> {
    let made = tempfile::Builder::new().prefix("sterna-bench-").tempdir_in(directory);
    made.map_err(|error| format!("{}: {error}", directory.display()))
}

fn report(args: &Args, lab: &Lab, tables: &[Table]) -> Result<(), Failure> {
    let qemu = lab.root.as_ref().and_then(|root| root.version("qemu-system-x86"));
    let qemu = qemu.unwrap_or_else(|| "none".to_owned());
    println!("\nQEMU {qemu}, {}", if lab.kvm { "KVM" } else { "no KVM" });
    let write = |path: &Path, text: String| {
        std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
    };
    let stored: Vec<_> = tables.iter().map(Table::json).collect();
    let all = serde_json::json!({"qemu": qemu, "kvm": lab.kvm, "ram_mib": args.ram, "tables": stored});
    if let Some(path) = &args.json {
        write(path, format!("{all:#}\n"))?;
    }
    if let Some(path) = &args.markdown {
        let rows = markdown::document(&Measured::now("qemu"), &markdown::qemu(&all));
        let details: Vec<_> = tables.iter().map(output::markdown).collect();
        write(path, format!("{rows}\nQEMU {qemu}.\n{}", details.concat()))?;
    }
    Ok(())
}
