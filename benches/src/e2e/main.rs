//! End to end on loopback: complete migrations of a guest in this process, compared with the machine's limits
//! over the same number of sockets.
//!
//! - *plain copy*: the same pages from and to the same memory, vectored writes of 512 KiB, received in place,
//!   without any other work.
//! - *other memory*: the same between two ordinary anonymous buffers with the standard library's sockets. The
//!   kernel copies somewhat slower from and to a memfd, which most VMMs use for guest RAM.
//! - *zero scan*: a scan of every page, without sending.
//!
//! Each repetition times all of them in order, so that other load on the host affects all of them equally.
//! The output is medians, and the ratios of each repetition.
#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

mod guest;
mod limits;
mod sample;

use clap::{Parser, ValueEnum};
use sample::Series;

/// Times migrations over loopback and compares them with this machine's limits.
#[derive(Parser)]
struct Args {
    /// RAM of the guest, MiB.
    #[arg(long, default_value_t = 4096)]
    ram: u64,
    /// Multifd channels; 0: only the main channel.
    #[arg(long, default_value_t = 2)]
    channels: u8,
    /// Content of RAM.
    #[arg(long, value_enum, default_value_t = Fill::Random)]
    fill: Fill,
    /// Pages per second that each of two workers writes; 0: an idle guest.
    #[arg(long, default_value_t = 0)]
    dirty: u64,
    /// Order of the writes.
    #[arg(long, value_enum, default_value_t = Dirty::Sequential)]
    pattern: Dirty,
    /// Repetitions of each measurement.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Do not touch the destination's memory first, so that first touches are measured as well.
    #[arg(long)]
    fresh: bool,
    /// Compression of the pages.
    #[arg(long, value_enum, default_value_t = Codec::None)]
    compression: Codec,
    /// Kind of memory that backs RAM.
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
    /// Like `memfd`, but mapped by the VMM: the engine may only read and write it.
    VmmMemfd,
    /// Like `anonymous`, but mapped by the VMM: the engine may only read and write it.
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
        // The first repetition is a warm-up and does not count.
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
