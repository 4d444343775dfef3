//! The machine's limits in the same run: copies in memory and over loopback, writes and reads of a file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sterna_ram::{Backing, GuestRam, RamBlock, RamSlice};
use sterna_transport::{Address, CancelFlag, Channel, IoPart, Listener};

use crate::Failure;
use crate::figures::Sample;
use sterna_benches::clock::CpuClock;

/// Size of a write in bytes, the same as a packet's payload.
const WRITE_BYTES: usize = 512 << 10;
/// Size of a disk request in bytes, and number of requests in flight.
const BLOCK_BYTES: usize = 1 << 20;
const DEPTH: usize = 8;
/// The largest alignment that O_DIRECT requires.
const ALIGNMENT: usize = 4096;
/// Limit of the memory for copies, larger than any cache. For larger guests it is copied several times.
const MOST_WINDOW_BYTES: u64 = 1 << 30;

/// Touched memory for copies, made like guest RAM.
pub struct Memory {
    from: GuestRam,
    to: GuestRam,
}

impl Memory {
    /// Makes memory for guests of `bytes`.
    pub fn new(bytes: u64) -> Result<Self, Failure> {
        let window = bytes.min(MOST_WINDOW_BYTES);
        let ram = |seed: u64| -> Result<GuestRam, Failure> {
            let block = RamBlock::new("limit", window, Backing::Memfd).map_err(|error| error.to_string())?;
            for at in (0..window).step_by(BLOCK_BYTES) {
                block.write(at, &noise(seed + at)).map_err(|error| error.to_string())?;
            }
            GuestRam::new(vec![block]).map_err(|error| error.to_string())
        };
        Ok(Self { from: ram(1)?, to: ram(2)? })
    }

    /// Copies `bytes` over `sockets` TCP connections of loopback: vectored writes, received in place.
    pub fn over_loopback(&self, bytes: u64, sockets: usize) -> Result<Sample, Failure> {
        let address = Address::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
        let listener = Listener::bind(&address).map_err(|error| error.to_string())?;
        let (limit, never) = (Duration::from_secs(10), CancelFlag::new());
        timed(|| {
            thread::scope(|scope| {
                let mut workers = Vec::new();
                for socket in 0..sockets {
                    let sender = Channel::connect(&listener.local_address(), limit, &never)?;
                    let receiver = listener.accept(Some(limit), &never)?;
                    let (mut from, mut to) = (
                        windows(&self.from, bytes, socket, sockets),
                        windows(&self.to, bytes, socket, sockets),
                    );
                    workers.push(
                        scope.spawn(move || from.try_for_each(|w| sender.write_parts(&[IoPart::Ram(w)]))),
                    );
                    workers.push(scope.spawn(move || to.try_for_each(|w| receiver.read_into_ram(&[w]))));
                }
                workers.into_iter().try_for_each(|worker| worker.join().unwrap_or(Ok(())))
            })
            .map_err(|error: sterna_transport::TransportError| error.to_string())
        })
    }
}

/// Every `sockets`th window of RAM, starting with number `socket`. They are repeated until `bytes` are
/// reached in total.
fn windows(ram: &GuestRam, bytes: u64, socket: usize, sockets: usize) -> impl Iterator<Item = RamSlice<'_>> {
    let in_ram = ram.block(0).len_bytes() / WRITE_BYTES as u64;
    (0..bytes / WRITE_BYTES as u64)
        .skip(socket)
        .step_by(sockets)
        .filter_map(move |n| ram.block(0).slice(n % in_ram * WRITE_BYTES as u64, WRITE_BYTES).ok())
}

/// Writes a new file of `bytes` with direct I/O until it is durable. Requests have 1 MiB, and 8 are in
/// flight.
pub fn write_file(path: &Path, bytes: u64) -> Result<Sample, Failure> {
    // An existing file is removed first, because images are also new files.
    let _ = std::fs::remove_file(path);
    let file = open(path, OpenOptions::new().write(true).create_new(true))?;
    let mut buffers = buffers(bytes);
    timed(|| {
        each_block(&mut buffers, bytes, |at, block| file.write_all_at(block, at))
            .and_then(|()| file.sync_all())
            .map_err(|error| format!("{}: {error}", path.display()))
    })
}

/// Reads the file in the same way.
pub fn read_file(path: &Path, bytes: u64) -> Result<Sample, Failure> {
    let file = open(path, OpenOptions::new().read(true))?;
    let mut buffers = buffers(bytes);
    timed(|| {
        each_block(&mut buffers, bytes, |at, block| file.read_exact_at(block, at))
            .map_err(|error| format!("{}: {error}", path.display()))
    })
}

/// Copies `bytes` in memory, with one thread.
pub fn copy_memory(bytes: u64) -> Result<Sample, Failure> {
    let (from, mut to) = (buffers(bytes / 2).concat(), buffers(bytes / 2).concat());
    timed(|| {
        for _ in 0..bytes.div_ceil(from.len() as u64) {
            to.copy_from_slice(&from);
            std::hint::black_box(&to);
        }
        Ok(())
    })
}

fn open(path: &Path, options: &mut OpenOptions) -> Result<File, Failure> {
    let opened = options.custom_flags(libc::O_DIRECT).open(path);
    opened.map_err(|error| format!("{}: {error}", path.display()))
}

/// Touched memory for each request in flight. The total equals a guest's RAM, because data in the CPU's cache
/// would be faster than any guest.
fn buffers(bytes: u64) -> Vec<Vec<u8>> {
    let each = (bytes.min(MOST_WINDOW_BYTES) as usize / DEPTH).max(BLOCK_BYTES);
    (0..DEPTH as u64)
        .map(|worker| {
            let mut buffer = noise(worker).repeat(each / BLOCK_BYTES);
            buffer.resize(buffer.len() + ALIGNMENT, 0);
            buffer
        })
        .collect()
}

/// Calls `act` for every block of `bytes`. There is one thread for each buffer, which gets a part of the
/// buffer.
fn each_block(
    buffers: &mut [Vec<u8>],
    bytes: u64,
    act: impl Fn(u64, &mut [u8]) -> std::io::Result<()> + Sync,
) -> std::io::Result<()> {
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        let workers: Vec<_> = buffers
            .iter_mut()
            .map(|buffer| {
                let (act, next) = (&act, &next);
                let skip = buffer.as_ptr().align_offset(ALIGNMENT);
                let aligned = buffer.len() - ALIGNMENT;
                let buffer = &mut buffer[skip..skip + aligned];
                scope.spawn(move || {
                    for turn in 0.. {
                        let at = next.fetch_add(BLOCK_BYTES as u64, Ordering::Relaxed);
                        if at >= bytes {
                            break;
                        }
                        let begin = turn * BLOCK_BYTES % aligned;
                        let len = (bytes - at).min(BLOCK_BYTES as u64) as usize;
                        act(at, &mut buffer[begin..begin + len])?;
                    }
                    Ok(())
                })
            })
            .collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().map_err(|_| std::io::Error::other("a worker panicked"))?)
    })
}

/// A block of random bytes that do not compress.
fn noise(seed: u64) -> Vec<u8> {
    let mut block = vec![0; BLOCK_BYTES];
    fastrand::Rng::with_seed(seed).fill(&mut block);
    block
}

fn timed(work: impl FnOnce() -> Result<(), Failure>) -> Result<Sample, Failure> {
    let clock = CpuClock::own();
    let (cpu, began) = (clock.read(), Instant::now());
    work()?;
    Ok(Sample { took: began.elapsed(), cpu: clock.read().saturating_sub(cpu), ..Sample::default() })
}
