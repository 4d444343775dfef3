//! Measures guests that are served by page faults: `cargo xtask bench faults [-- --mib N]`.
//!
//! - *Fault*: the time in which a guest's access to a missing page returns, while the background fill runs.
//! - *Work*: the speed of a guest that reads and writes a part of its memory, during the fill against afterwards.
//! - *Start*: the time from the handshake to the first answered access, for 16 guests that start at the same time.
//! - *Cloud Hypervisor*: saves and restores of its machines, and page requests of its walk through the memory.
//!
//! Guests are processes of their own with a real userfaultfd. The image is a raw file in the page cache.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints its figures")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use sterna_pager::{FillRate, Pager, PagerOptions, RawMemory, SocketPlan};
use sterna_uffd_peer::Peer;

const MIB: u64 = 1 << 20;
/// The argument of a process that is a guest.
const GUEST: &str = "--guest";
const STARTED_AT_ONCE: usize = 16;
/// Memory that the guest works on.
const WORK_BYTES: u64 = 64 * MIB;
/// Length of one measurement of the guest's work, in milliseconds.
const WORK_MS: u64 = 200;

type Failure = Box<dyn std::error::Error>;

mod walk;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.iter().any(|argument| argument == GUEST) {
        sterna_uffd_peer::child();
        return;
    }
    let mib = arguments.iter().position(|argument| argument == "--mib");
    let mib = mib.and_then(|at| arguments.get(at + 1)?.parse().ok()).unwrap_or(1024);
    if let Err(why) = walk::run(mib * MIB).and_then(|()| run(mib * MIB)) {
        eprintln!("{why}");
        std::process::exit(1);
    }
}

fn run(bytes: u64) -> Result<(), Failure> {
    let directory = tempfile::tempdir()?;
    let image = directory.path().join("memory");
    std::fs::write(&image, sterna_uffd_peer::memory(bytes))?;
    let mut guest = start()?;
    if let Err(why) = guest.map(4096, &[bytes]) {
        println!("SKIPPED faults: userfaultfd: {why}");
        return Ok(());
    }
    drop(guest);
    println!("| what | measured | goal |\n| --- | --- | --- |");
    for (name, fill) in [("off", FillRate::Off), ("adaptive", FillRate::Adaptive), ("max", FillRate::Max)] {
        faults(&image, bytes, name, fill)?;
    }
    for (name, fill) in [("adaptive", FillRate::Adaptive), ("max", FillRate::Max)] {
        work(&image, bytes, name, fill)?;
    }
    starts(directory.path(), &image)
}

fn start() -> Result<Peer, Failure> {
    Ok(Peer::start(Command::new(std::env::current_exe()?).arg(GUEST))?)
}

fn pager(image: &Path, sockets: &[PathBuf], fill: FillRate) -> Result<Pager, Failure> {
    let plans: Vec<SocketPlan> =
        sockets.iter().map(|path| SocketPlan { path: path.clone(), guests: 1 }).collect();
    let options = PagerOptions { fill, ..PagerOptions::default() };
    Ok(Pager::start(Arc::new(RawMemory::open(image)?), &plans, options)?)
}

fn served(image: &Path, bytes: u64, fill: FillRate) -> Result<(Pager, Peer), Failure> {
    let socket = image.with_extension("sock");
    let pager = pager(image, std::slice::from_ref(&socket), fill)?;
    let mut guest = start()?;
    guest.map(4096, &[bytes])?;
    guest.hand_over(&socket, "whole")?;
    Ok((pager, guest))
}

fn faults(image: &Path, bytes: u64, name: &str, fill: FillRate) -> Result<(), Failure> {
    let (pager, mut guest) = served(image, bytes, fill)?;
    let answer = guest.ask("latencies 4000 50 7")?;
    let mut times: Vec<u64> = answer.split(' ').filter_map(|time| time.parse().ok()).collect();
    times.sort_unstable();
    // Accesses to pages that are there are the fastest ones.
    let faults = pager.guests().first().map_or(0, |guest| guest.faults) as usize;
    let times = &times[times.len().saturating_sub(faults)..];
    let of = |share: f64| {
        let index = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
        times.get(index).map_or(f64::NAN, |time| *time as f64 / 1e3)
    };
    println!(
        "| fault, fill {name} ({} faults): p50; p99 | {:.1} µs; {:.1} µs | ≤ 30 µs; ≤ 1000 µs |",
        times.len(),
        of(0.5),
        of(0.99)
    );
    Ok(())
}

fn work(image: &Path, bytes: u64, name: &str, fill: FillRate) -> Result<(), Failure> {
    let (pager, mut guest) = served(image, bytes, fill)?;
    let command = format!("work {WORK_BYTES} {WORK_MS}");
    // The first round waits for the pages of its own memory.
    let first: f64 = guest.ask(&command)?.parse()?;
    let is_over = |pager: &Pager| pager.guests().iter().all(|guest| guest.is_over());
    let mut during: Vec<f64> = Vec::new();
    while !is_over(&pager) {
        let pages = guest.ask(&command)?.parse()?;
        if !is_over(&pager) {
            during.push(pages);
        }
    }
    let seconds = pager.guests().first().map_or(0.0, |guest| guest.time.as_secs_f64());
    let mut after: Vec<f64> = Vec::new();
    for _ in 0..10 {
        after.push(guest.ask(&command)?.parse()?);
    }
    let (during, after) = (median(&mut during), median(&mut after));
    println!(
        "| work during the fill against afterwards, fill {name} ({seconds:.1} s); with the first {WORK_MS} ms | {:.2}; {:.2} | ≥ 0.9 |",
        during / after,
        first / after
    );
    Ok(())
}

fn starts(directory: &Path, image: &Path) -> Result<(), Failure> {
    let bytes = std::fs::metadata(image)?.len();
    let sockets: Vec<PathBuf> =
        (0..STARTED_AT_ONCE).map(|index| directory.join(format!("{index}.sock"))).collect();
    let pager = pager(image, &sockets, FillRate::Adaptive)?;
    let mut guests = Vec::new();
    for _ in 0..STARTED_AT_ONCE {
        let mut guest = start()?;
        guest.map(4096, &[bytes])?;
        guests.push(guest);
    }
    for (guest, socket) in guests.iter_mut().zip(&sockets) {
        guest.tell(&format!("first {}", socket.display()))?;
    }
    let mut times = Vec::new();
    for guest in &mut guests {
        times.push(guest.answer()?.parse::<f64>()? / 1e6);
    }
    println!(
        "| {STARTED_AT_ONCE} guests at the same time, handshake to first access: p50 | {:.1} ms | ≤ 80 ms |",
        median(&mut times)
    );
    drop(pager);
    Ok(())
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
