//! What protecting a QEMU's guest costs it: the pause for each checkpoint, with QEMU's own secondary (COLO) and with a standby that holds
//! checkpoints and runs nothing, beside each other.
//!
//! - The primary is the same QEMU in all rows but `sterna`: `pc`, one vCPU, no network card and no replicated disk. The clock is its own:
//!   from its event STOP to its event RESUME, in microseconds. The seeding's pause is left out. All machines run on KVM, if there is one.
//! - `qemu`: QEMU with `-incoming` and `x-colo`, whose guest runs, too. `standby`: `sterna::replica::Standby` in this process. `protect`:
//!   the same behind `QemuProtection`, which relays the stream and waits for the contact's answers. `sterna`: two VMs of `sterna run` with
//!   the same boot sector and the command `sterna protect`; needs KVM. While idle it writes a page each second.
//! - All are connected by Unix sockets on this host, so the cores are shared by everybody.
//! - Beside the pauses of Sterna's VM stands what a plain copy of as many pages takes, with as many threads.
//! - The ways take turns with each setting, so that a machine that is slower for a while is slower for all.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints its figures")]

mod copy;
mod pair;
mod pauses;
mod sterna;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use serde_json::{Value, json};
use sterna_interop::Root;

use pauses::{Measured, Setting};

/// What went wrong, in words.
type Failure = String;

/// Measures the pauses of checkpoints.
#[derive(Parser)]
struct Args {
    /// RAM of the guest, MiB.
    #[arg(long, default_value_t = 256)]
    ram: u64,
    /// Who is at the other end.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "qemu,standby,protect,sterna")]
    ways: Vec<Way>,
    /// What the guest does.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "idle,writer")]
    loads: Vec<Load>,
    /// Milliseconds from checkpoint to checkpoint.
    #[arg(long, value_delimiter = ',', default_value = "600,100,10")]
    delays: Vec<u64>,
    /// Multifd channels; 0: the main channel alone.
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,4")]
    channels: Vec<u8>,
    /// Pages that the writer writes in a second.
    #[arg(long, default_value_t = 25_000)]
    pages_per_second: u64,
    /// How `sterna run` keeps the dirty pages (x-sterna-checkpoint-copy).
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    copies: Vec<String>,
    /// Seconds for each row.
    #[arg(long, default_value_t = 6.0)]
    seconds: f64,
    /// The `sterna` command, for the way `sterna`.
    #[arg(long, default_value = "sterna")]
    sterna: PathBuf,
    /// Write the rows as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum, PartialEq, Eq)]
enum Way {
    /// QEMU's own secondary.
    Qemu,
    /// A standby.
    Standby,
    /// A standby with all that protects a guest beside QEMU.
    Protect,
    /// A VM of `sterna run`, and its standby another one.
    Sterna,
}

#[derive(Debug, Clone, Copy, ValueEnum, PartialEq, Eq)]
enum Load {
    /// The firmware waits for a disk.
    Idle,
    /// The boot sector writes half of RAM at a pace.
    Writer,
}

impl Way {
    fn word(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::Standby => "standby",
            Self::Protect => "protect",
            Self::Sterna => "sterna",
        }
    }
}

impl Load {
    fn word(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Writer => "writer",
        }
    }
}

fn main() {
    let args = Args::parse();
    if let Err(why) = run(&args) {
        eprintln!("{why}");
        std::process::exit(1);
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("bench colo") else { return Ok(()) };
    println!(
        "| load | delay, ms | channels | other end | checkpoints/s | pause, ms: mean | p50 | p99 | of | pages each | bytes / dirty | \
         CPU ms each: primary | standby | standby resident, MiB | plain copy of the pages, ms |"
    );
    println!("|{}", " --- |".repeat(15));
    let mut rows = Vec::new();
    for &load in &args.loads {
        for &delay in &args.delays {
            for &channels in &args.channels {
                for &way in &args.ways {
                    // Only Sterna's own machine has more than one way to keep pages.
                    let auto = ["auto".to_owned()];
                    let copies = if way == Way::Sterna { &args.copies[..] } else { &auto[..] };
                    for copy in copies {
                        let setting = Setting {
                            way,
                            ram_mib: args.ram,
                            pages_per_second: if load == Load::Writer { args.pages_per_second } else { 0 },
                            delay: Duration::from_millis(delay),
                            channels,
                            copy: copy.clone(),
                            time: Duration::from_secs_f64(args.seconds),
                        };
                        let measured = match way {
                            Way::Sterna => sterna::measure(&root, args.sterna.clone(), &setting),
                            _ => pair::measure(&root, &setting),
                        };
                        let measured = measured.map_err(|why| {
                            format!("{} {} {delay} ms, {channels}: {why}", way.word(), load.word())
                        })?;
                        println!("{}", row(load, &setting, &measured));
                        rows.push(value(load, &setting, &measured));
                    }
                }
            }
        }
    }
    if let Some(file) = &args.json {
        let all = json!({"schema": "sterna-bench-colo", "version": 1, "ram_mib": args.ram, "rows": rows});
        std::fs::write(file, format!("{all:#}\n")).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}

fn row(load: Load, setting: &Setting, measured: &Measured) -> String {
    let ms = |time: Duration| format!("{:.1}", time.as_secs_f64() * 1e3);
    let ms2 = |time: Duration| format!("{:.2}", time.as_secs_f64() * 1e3);
    let (costs, each) = (&measured.costs, measured.pauses.len().max(1) as u32);
    format!(
        "| {} | {} | {} | {} | {:.1} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
        load.word(),
        setting.delay.as_millis(),
        setting.channels,
        setting.name(),
        measured.per_second(),
        ms(measured.mean()),
        ms(measured.at_most(500)),
        ms(measured.at_most(990)),
        measured.pauses.len(),
        if costs.pages > 0 { format!("{:.0}", costs.pages as f64 / each as f64) } else { "–".to_owned() },
        if costs.pages > 0 {
            format!("{:.2}", costs.bytes as f64 / (costs.pages << 12) as f64)
        } else {
            "–".to_owned()
        },
        ms(costs.primary_cpu / each),
        ms(costs.standby_cpu / each),
        measured.standby_resident_bytes >> 20,
        if setting.way == Way::Sterna {
            ms2(copy::median(costs.pages / u64::from(each)))
        } else {
            "–".to_owned()
        },
    )
}

fn value(load: Load, setting: &Setting, measured: &Measured) -> Value {
    json!({
        "load": load.word(),
        "pages_per_second": setting.pages_per_second,
        "delay_ms": setting.delay.as_millis() as u64,
        "channels": setting.channels,
        "way": setting.way.word(),
        "copy": setting.copy,
        "checkpoints_per_second": measured.per_second(),
        "pages": measured.costs.pages,
        "bytes": measured.costs.bytes,
        "primary_cpu_s": measured.costs.primary_cpu.as_secs_f64(),
        "standby_cpu_s": measured.costs.standby_cpu.as_secs_f64(),
        "standby_resident_bytes": measured.standby_resident_bytes,
        "pauses_us": measured.pauses.iter().map(|pause| pause.as_micros() as u64).collect::<Vec<_>>(),
    })
}
