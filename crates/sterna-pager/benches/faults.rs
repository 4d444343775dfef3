//! Measures guests that are served by page faults: `cargo xtask bench faults [-- --mib N]`.
//!
//! - *Fault*: the time in which a guest's access to a missing page returns, while the background fill runs. The least that is
//!   possible here is measured with it: a thread that does nothing but answer.
//! - *Work*: the speed of a guest that reads and writes a part of its memory, during the fill against afterwards.
//! - *Start*: the time from the handshake to the first answered access, for 16 guests that start at the same time.
//! - *Cloud Hypervisor*: saves and restores of its machines, and page requests of its walk through the memory.
//!
//! Guests are processes of their own with a real userfaultfd. The images are a raw file and a compressed image, in the page cache.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints its figures")]

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use sterna_pager::{FillRate, PageSource, Pager, PagerOptions, RawMemory, SocketPlan, StoredMemory};
use sterna_store::{Block, ImageWriter, StoredImage, WriteOptions};
use sterna_uffd_peer::Peer;

const MIB: u64 = 1 << 20;
/// The argument of a process that is a guest.
const GUEST: &str = "--guest";
const STARTED_AT_ONCE: usize = 16;
/// 4000 accesses to random pages, with pauses of 50 µs, seed 7.
const LATENCIES: &str = "latencies 4000 50 7";
/// Memory that the guest works on.
const WORK_BYTES: u64 = 64 * MIB;
/// Length of one measurement of the guest's work, in milliseconds.
const WORK_MS: u64 = 200;

type Failure = Box<dyn std::error::Error>;

#[path = "faults/bare.rs"]
mod bare;
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
    let memory = half_compressible(bytes);
    std::fs::write(&image, &memory)?;
    let compressed = compress(directory.path(), &memory)?;
    drop(memory);
    let mut guest = start()?;
    if let Err(why) = guest.map(4096, &[bytes]) {
        println!("SKIPPED faults: userfaultfd: {why}");
        return Ok(());
    }
    drop(guest);
    println!("| what | measured | goal |\n| --- | --- | --- |");
    bare_faults(directory.path(), &image, bytes)?;
    for (kind, path, goal) in [("raw", &image, 30), ("compressed", &compressed, 150)] {
        for (name, fill) in [("off", FillRate::Off), ("adaptive", FillRate::Adaptive), ("max", FillRate::Max)]
        {
            let (pager, mut guest) = served(path, bytes, fill)?;
            let answer = guest.ask(LATENCIES)?;
            let faults = pager.guests().first().map_or(0, |guest| guest.faults) as usize;
            let goal = format!("≤ {goal} µs; ≤ 1000 µs");
            shown(&format!("fault, {kind} image, fill {name}"), &answer, faults, &goal);
        }
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
    let source: Arc<dyn PageSource> = match image.extension().is_some() {
        true => Arc::new(StoredMemory::new(StoredImage::open(image, None)?)?),
        false => Arc::new(RawMemory::open(image)?),
    };
    Ok(Pager::start(source, &plans, options)?)
}

fn served(image: &Path, bytes: u64, fill: FillRate) -> Result<(Pager, Peer), Failure> {
    let socket = image.with_extension("sock");
    let pager = pager(image, std::slice::from_ref(&socket), fill)?;
    let mut guest = start()?;
    guest.map(4096, &[bytes])?;
    guest.hand_over(&socket, "whole")?;
    Ok((pager, guest))
}

/// Pages of which a half is random, and the other repeats. Every fifth page is zero.
fn half_compressible(bytes: u64) -> Vec<u8> {
    let mut memory = sterna_uffd_peer::memory(bytes);
    for page in memory.chunks_exact_mut(4096) {
        if page[0] != 0 || page[1] != 0 {
            page[2048..].fill(0x5a);
        }
    }
    memory
}

fn compress(directory: &Path, memory: &[u8]) -> Result<PathBuf, Failure> {
    let path = directory.join("memory.sterna");
    let block = Block { name: "ram".to_owned(), length_bytes: memory.len() as u64, address: None };
    let writer = ImageWriter::create(&path, vec![block], WriteOptions::default())?;
    let extent_bytes = writer.extent_bytes() as usize;
    let mut lane = writer.lane()?;
    for (extent, content) in memory.chunks(extent_bytes).enumerate() {
        lane.put(0, extent as u64, content)?;
    }
    drop(lane);
    writer.complete(&[])?;
    Ok(path)
}

/// The answer of one thread that does nothing else, without a fill.
fn bare_faults(directory: &Path, image: &Path, bytes: u64) -> Result<(), Failure> {
    let socket = directory.join("bare.sock");
    let listener = UnixListener::bind(&socket)?;
    let mut guest = start()?;
    guest.map(4096, &[bytes])?;
    std::thread::scope(|scope| {
        let server = scope.spawn(|| bare::serve(&listener, image).map_err(|why| why.to_string()));
        guest.hand_over(&socket, "whole")?;
        let answer = guest.ask(LATENCIES)?;
        // 4000 random pages of many are nearly all different.
        shown("fault, answered by a thread alone, no fill", &answer, 3900, "the least");
        drop(guest);
        server.join().map_err(|_| "the thread panicked")?.map_err(Into::into)
    })
}

/// Prints the times of the accesses that were faults. Accesses to pages that are there are the fastest ones.
fn shown(what: &str, answer: &str, faults: usize, goal: &str) {
    let mut times: Vec<u64> = answer.split(' ').filter_map(|time| time.parse().ok()).collect();
    times.sort_unstable();
    let times = &times[times.len().saturating_sub(faults)..];
    let of = |share: f64| {
        let index = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
        times.get(index).map_or(f64::NAN, |time| *time as f64 / 1e3)
    };
    println!(
        "| {what} ({} faults): p50; p99 | {:.1} µs; {:.1} µs | {goal} |",
        times.len(),
        of(0.5),
        of(0.99)
    );
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
