//! Times a local disk that migrates with its guest. It is compared with a plain copy of the disk's data over
//! as many sockets.
//!
//! The disk is sparse: every second piece of 64 MiB has data. During the copy, a thread writes to the disk at
//! random positions, as the guest's requests do. Plain copy and migration alternate. Both end when the data
//! is durable at the destination.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints its figures")]

mod plain;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use sterna::{
    Address, Arrival, Capabilities, Incoming, Migration, Outcome, Parameters, SourceVm, Statistics, TargetVm,
};
use sterna_benches::Failure;
use sterna_vmm::{DiskMigration, DiskOptions, GuestImage, KvmMachine, MachineConfig};

const MIB: u64 = 1 << 20;
const RAM_BYTES: u64 = 64 * MIB;
/// Length of the pieces with data, and of the holes between them.
const PIECE_BYTES: u64 = 64 * MIB;
/// `hlt` and a jump back to it: a guest that uses no CPU time.
const HALTS: [u8; 3] = [0xf4, 0xeb, 0xfd];
const REQUEST_BYTES: u64 = 64 << 10;

/// Times the copy of a disk that migrates with its guest.
#[derive(Parser)]
struct Args {
    /// Length of the disk, MiB; half of it has data.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u64).range(128..))]
    disk: u64,
    /// Rate of writes to the disk during the copy, MB/s.
    #[arg(long, default_value_t = 20)]
    rate: u64,
    /// Multifd channels, and sockets of the plain copy.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    channels: u8,
    /// Repetitions of each measurement.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Directory for the disks.
    #[arg(long, default_value = "/tmp")]
    dir: PathBuf,
}

fn main() {
    if let Err(why) = run(&Args::parse()) {
        eprintln!("disk: {why}");
        std::process::exit(1);
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    if !Path::new("/dev/kvm").exists() {
        println!("disk: skipped: there is no /dev/kvm");
        return Ok(());
    }
    let place = tempfile::tempdir_in(&args.dir).map_err(said)?;
    let (from, to) = (place.path().join("from"), place.path().join("to"));
    let bytes = args.disk * MIB;
    println!(
        "a disk of {} MiB, half of it data, {} MB/s written to it, {} channels, {} runs in turns",
        args.disk, args.rate, args.channels, args.runs
    );
    let mut ratios = Vec::new();
    for turn in 0..args.runs {
        fill(&from, bytes, turn as u64)?;
        empty(&to, bytes)?;
        let plain = plain::copy(&from, &to, bytes, usize::from(args.channels)).map_err(said)?;
        empty(&to, bytes)?;
        let moved = migrate(&from, &to, args)?;
        same(&from, &to, bytes)?;
        let total = moved.total.as_secs_f64();
        ratios.push(total / plain.as_secs_f64());
        println!(
            "plain copy {:.2} s, migration {total:.2} s ({:.2}), pause {} ms, {} MiB sent, {} MiB written meanwhile",
            plain.as_secs_f64(),
            total / plain.as_secs_f64(),
            moved.pause.as_millis(),
            moved.sent_bytes / MIB,
            moved.written_bytes / MIB,
        );
    }
    ratios.sort_by(f64::total_cmp);
    println!("median of the ratios: {:.2}; the disks were equal each time", ratios[ratios.len() / 2]);
    Ok(())
}

/// Results of a completed migration.
struct Moved {
    total: Duration,
    pause: Duration,
    sent_bytes: u64,
    written_bytes: u64,
}

fn migrate(from: &Path, to: &Path, args: &Args) -> Result<Moved, Failure> {
    let (source, target) = (machine(from, false)?, machine(to, true)?);
    source.resume().map_err(said)?;
    let params =
        Parameters { multifd_channels: args.channels, max_bandwidth_bytes: 0, ..Parameters::default() };
    let capabilities = Capabilities { multifd: true, ..Capabilities::default() };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write(&source, args, &is_over));
        let began = Instant::now();
        let moved = (|| {
            let (source, target) =
                (Arc::clone(&source) as Arc<dyn SourceVm>, Arc::clone(&target) as Arc<dyn TargetVm>);
            let address: Address = "tcp:127.0.0.1:0".parse().map_err(said)?;
            let incoming = Incoming::listen(target, &address, params.clone(), capabilities, Arc::new(()))
                .map_err(said)?;
            let migration = Migration::start(source, &incoming.address(), params, capabilities, Arc::new(()))
                .map_err(said)?;
            match (migration.wait(), incoming.wait()) {
                (Outcome::Completed, Arrival::Completed(_)) => Ok(migration.statistics()),
                other => Err(format!("the migration ended with {other:?}")),
            }
        })();
        let total = began.elapsed();
        is_over.store(true, Ordering::Relaxed);
        let written = writer.join().map_err(|_| "the writer panicked".to_owned())?.map_err(said)?;
        moved.map(|statistics: Statistics| Moved {
            total,
            pause: statistics.downtime.unwrap_or_default(),
            sent_bytes: statistics.transferred_bytes,
            written_bytes: written,
        })
    })
}

/// Writes at the given rate until the guest is stopped. Returns the bytes written.
fn write(machine: &KvmMachine, args: &Args, is_over: &AtomicBool) -> io::Result<u64> {
    let mut random = fastrand::Rng::with_seed(args.disk);
    let (began, mut written) = (Instant::now(), 0);
    let mut data = vec![0; REQUEST_BYTES as usize];
    while !is_over.load(Ordering::Relaxed) {
        let due = (began.elapsed().as_secs_f64() * args.rate as f64 * 1e6) as u64;
        if written >= due {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        random.fill(&mut data);
        let at = random.u64(..args.disk * MIB / REQUEST_BYTES) * REQUEST_BYTES;
        if !machine.write_to_disk(0, at, &data)? {
            break;
        }
        written += REQUEST_BYTES;
    }
    Ok(written)
}

/// A machine with this disk and an idle guest.
fn machine(disk: &Path, incoming: bool) -> Result<Arc<KvmMachine>, Failure> {
    let mut options = DiskOptions::new(disk);
    options.migration = DiskMigration::Copy;
    KvmMachine::new(MachineConfig {
        ram_bytes: RAM_BYTES,
        guest: (!incoming).then(|| GuestImage::Flat64 { code: HALTS.to_vec(), parameters: vec![] }),
        incoming,
        disks: vec![options],
        ..MachineConfig::new("disk")
    })
    .map_err(said)
}

/// Makes a durable file of that length, with random data in every second piece.
fn fill(path: &Path, bytes: u64, seed: u64) -> Result<(), Failure> {
    let file = File::create(path).map_err(said)?;
    file.set_len(bytes).map_err(said)?;
    let mut data = vec![0; MIB as usize];
    let mut random = fastrand::Rng::with_seed(seed);
    for at in plain::data_pieces(bytes) {
        random.fill(&mut data);
        file.write_all_at(&data, at).map_err(said)?;
    }
    file.sync_all().map_err(said)
}

fn empty(path: &Path, bytes: u64) -> Result<(), Failure> {
    // The old file is removed first, because freeing its blocks takes time that must not be measured.
    let _ = std::fs::remove_file(path);
    let file = File::create(path).map_err(said)?;
    file.set_len(bytes).map_err(said)?;
    file.sync_all().map_err(said)
}

fn same(from: &Path, to: &Path, bytes: u64) -> Result<(), Failure> {
    let (from, to) = (File::open(from).map_err(said)?, File::open(to).map_err(said)?);
    let (mut left, mut right) = (vec![0; MIB as usize], vec![0; MIB as usize]);
    for at in (0..bytes).step_by(MIB as usize) {
        from.read_exact_at(&mut left, at).map_err(said)?;
        to.read_exact_at(&mut right, at).map_err(said)?;
        if left != right {
            return Err(format!("the disks differ in the MiB from byte {at} on"));
        }
    }
    Ok(())
}

fn said(error: impl std::fmt::Display) -> Failure {
    error.to_string()
}
