//! End to end on loopback: whole migrations of a guest in this process, and in the same run what the machine
//! can do over the same number of sockets.
//!
//! - *plain copy*: the same pages from and to the same memory, 512 KiB vectored writes, received in place,
//!   nothing else.
//! - *other memory*: the same between two ordinary anonymous buffers with the standard library's sockets.
//!   The kernel copies from and to a memfd, which most VMMs use for guest RAM, somewhat more slowly.
//! - *zero scan*: looking at every page, without sending.
//!
//! Each repetition times all of them one after the other, so that a noisy neighbour hits all alike; what is
//! printed are medians, and the ratio repetition by repetition.
#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

mod guest;
mod limits;
mod sample;

use clap::{Parser, ValueEnum};
use sample::Series;

/// Times migrations over loopback against this machine's limits.
#[derive(Parser)]
struct Args {
    /// RAM of the guest, MiB.
    #[arg(long, default_value_t = 4096)]
    ram: u64,
    /// Multifd channels; 0: the main channel alone.
    #[arg(long, default_value_t = 2)]
    channels: u8,
    /// What RAM contains.
    #[arg(long, value_enum, default_value_t = Fill::Random)]
    fill: Fill,
    /// Pages per second that each of two workers writes; 0: an idle guest.
    #[arg(long, default_value_t = 0)]
    dirty: u64,
    /// The order in which they write.
    #[arg(long, value_enum, default_value_t = Dirty::Sequential)]
    pattern: Dirty,
    /// Repetitions.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Do not touch the destination's memory before, so that first touches are measured, too.
    #[arg(long)]
    fresh: bool,
    /// Compression of the pages.
    #[arg(long, value_enum, default_value_t = Codec::None)]
    compression: Codec,
    /// What kind of memory RAM is.
    #[arg(long, value_enum, default_value_t = Memory::Memfd)]
    backing: Memory,
    /// Print each migration's rounds and switchover.
    #[arg(long)]
    timeline: bool,
    /// Print results as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum, PartialEq, Eq, Debug)]
enum Fill {
    Random,
    Zero,
    Half,
}

#[derive(Clone, Copy, ValueEnum, Debug)]
enum Dirty {
    Sequential,
    Random,
    HotSet,
}

#[derive(Clone, Copy, ValueEnum, Debug)]
enum Memory {
    Memfd,
    Anonymous,
    /// As `memfd`, but mapped by the VMM, which permits the engine nothing but to read and write it.
    VmmMemfd,
    /// As `anonymous`, but mapped by the VMM, which permits the engine nothing but to read and write it.
    VmmAnonymous,
}

#[derive(Clone, Copy, ValueEnum, Debug)]
enum Codec {
    None,
    Zlib,
    Zstd,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let bytes = args.ram << 20;
    let sockets = usize::from(args.channels.max(1));
    let copy = limits::CopyBuffers::new(bytes / sockets as u64, sockets);
    let mut migrations = Series::new("migration");
    let mut other = Series::new("other memory");
    let mut plain = Series::new("plain copy");
    let mut scans = Series::new("zero scan");
    let pair = guest::Pair::new(&args)?;
    for run in 0..=args.runs {
        let migration = pair.migrate(&args)?;
        let copied = copy.run()?;
        let channelled = limits::plain_copy(&pair.source_ram(), pair.target_ram(), sockets)?;
        let scanned = limits::zero_scan(&pair.source_ram(), sockets);
        // The first repetition warms up.
        if run > 0 {
            migrations.push(migration);
            other.push(copied);
            plain.push(channelled);
            scans.push(scanned);
        }
    }
    if args.json {
        println!("{}", serde_json::json!([migrations.json(), plain.json(), other.json(), scans.json()]));
        return Ok(());
    }
    println!(
        "{} MiB, {:?} fill, {} channels, {} pages/s dirtied, destination {}; medians of {}",
        args.ram,
        args.fill,
        args.channels,
        2 * args.dirty,
        if args.fresh { "fresh" } else { "touched before" },
        args.runs
    );
    for series in [&migrations, &plain, &other, &scans] {
        println!("{series}");
    }
    println!("migration / plain copy:   {:.2}", migrations.speed_ratio(&plain));
    println!("migration / other memory: {:.2}", migrations.speed_ratio(&other));
    println!("migration / zero scan:    {:.2}", migrations.speed_ratio(&scans));
    Ok(())
}
