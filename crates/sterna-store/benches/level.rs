//! Measures `--level auto` against fixed levels: `cargo xtask bench level [-- --mib N]`.
//!
//! An image is saved into stores whose disk takes a chosen rate: the time until the image is durable, and its size. No save
//! can be faster than its compressor alone, and a save without compression (level 0) shows the disk. The time is compared with
//! the slower of both. The pages are a quarter zeros, a quarter noise, and half words of a language.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a bench prints its figures")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use sterna_store::{
    Blob, Block, Condition, DirectoryObjects, ImageStore, Listed, Objects, PAGE_BYTES, Recipe, StoreError,
    Tag, Upload, WriteOptions,
};

type Failure = Box<dyn std::error::Error>;

const MIB: usize = 1 << 20;
const EXTENT: usize = 64 << 10;
/// Rates of the disk in MB/s; the last is the disk as it is.
const RATES: [Option<u64>; 4] = [Some(10), Some(40), Some(160), None];
const LEVELS: [i32; 5] = [1, 3, 5, 7, 9];
/// A save may take so many times as long as the slower of the raw save and the compressor alone.
const MOST: f64 = 1.1;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let mib = arguments.iter().position(|argument| argument == "--mib");
    let mib = mib.and_then(|at| arguments.get(at + 1)?.parse().ok()).unwrap_or(512);
    if let Err(why) = run(mib * MIB) {
        eprintln!("{why}");
        std::process::exit(1);
    }
}

fn run(bytes: usize) -> Result<(), Failure> {
    let memory = memory(bytes);
    println!("| compressor alone, level | s |\n| --- | --- |");
    let mut alone = Vec::new();
    for level in LEVELS {
        let seconds = compress(&memory, level)?;
        println!("| {level} | {seconds:.2} |");
        alone.push((level, seconds));
    }
    println!("\n| disk | level | s | stored, MB | against the slower of raw and compressor, ≤ {MOST} |");
    println!("| --- | --- | --- | --- | --- |");
    for rate in RATES {
        let disk = rate.map_or("as it is".to_owned(), |rate| format!("{rate} MB/s"));
        let (raw, stored, _) = save(&memory, rate, 0, false)?;
        println!("| {disk} | 0 (raw) | {raw:.2} | {:.0} | |", stored as f64 / 1e6);
        let mut best = f64::MAX;
        for (level, compressor) in &alone {
            let (seconds, stored, _) = save(&memory, rate, *level, false)?;
            best = best.min(seconds);
            let share = seconds / raw.max(*compressor);
            println!("| {disk} | {level} | {seconds:.2} | {:.0} | {share:.2} |", stored as f64 / 1e6);
        }
        let (seconds, stored, end) = save(&memory, rate, 1, true)?;
        // The fastest compressor: the level of `auto` changes.
        let share = seconds / raw.max(alone[0].1);
        println!(
            "| {disk} | auto (at the end {end}) | {seconds:.2}: {:.2} of the best | {:.0} | {share:.2} |",
            seconds / best,
            stored as f64 / 1e6
        );
    }
    Ok(())
}

/// Compresses the memory with two threads, and keeps nothing. Returns the time in seconds.
fn compress(memory: &[u8], level: i32) -> Result<f64, Failure> {
    let began = Instant::now();
    let next = AtomicU64::new(0);
    let extents: Vec<&[u8]> = memory.chunks(EXTENT).collect();
    let work = || -> std::io::Result<()> {
        let mut compressor = zstd::bulk::Compressor::new(level)?;
        loop {
            let extent = next.fetch_add(1, Ordering::Relaxed);
            let Some(content) = extents.get(extent as usize) else { return Ok(()) };
            std::hint::black_box(compressor.compress(content)?);
        }
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(work);
        work()?;
        other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    Ok(began.elapsed().as_secs_f64())
}

/// Saves the memory with two threads. Returns the time in seconds, the stored bytes, and the level at the end.
fn save(memory: &[u8], rate: Option<u64>, level: i32, adapts: bool) -> Result<(f64, u64, i32), Failure> {
    let directory = tempfile::tempdir()?;
    let disk = Disk::new(directory.path(), rate)?;
    let store = ImageStore::new(Arc::new(disk), None);
    let block = Block { name: "ram".into(), length_bytes: memory.len() as u64, address: None };
    let began = Instant::now();
    let options = WriteOptions { level, adapts, ..WriteOptions::default() };
    let writer = store.writer("image", vec![block], options)?;
    let next = AtomicU64::new(0);
    let extents: Vec<&[u8]> = memory.chunks(EXTENT).collect();
    std::thread::scope(|scope| {
        let work = || -> Result<(), StoreError> {
            let mut lane = writer.lane()?;
            loop {
                let extent = next.fetch_add(1, Ordering::Relaxed);
                let Some(content) = extents.get(extent as usize) else { return Ok(()) };
                lane.put(0, extent, content)?;
            }
        };
        let other = scope.spawn(work);
        work()?;
        other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    let written = writer.complete(&[("memory", Recipe::default())])?;
    Ok((began.elapsed().as_secs_f64(), written.bytes, written.level))
}

/// Pages of a guest: zeros, noise, and words.
fn memory(bytes: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(1);
    let words: Vec<String> =
        (0..4000).map(|_| (0..rng.usize(2..10)).map(|_| rng.lowercase()).collect()).collect();
    let mut memory = Vec::with_capacity(bytes);
    while memory.len() < bytes {
        let end = memory.len() + PAGE_BYTES;
        match memory.len() / PAGE_BYTES % 16 {
            0..4 => {}
            4..8 => memory.extend((0..PAGE_BYTES / 8).flat_map(|_| rng.u64(..).to_le_bytes())),
            _ => {
                while memory.len() < end {
                    // Frequent words are frequent, as in a language.
                    let word = &words[rng.usize(1..4000) * rng.usize(1..4000) / 4000];
                    memory.extend(word.bytes().chain([b' ']));
                }
            }
        }
        memory.resize(end, 0);
    }
    memory
}

/// A directory on a disk that takes a rate.
struct Disk {
    inner: DirectoryObjects,
    rate: Option<u64>,
}

impl Disk {
    fn new(directory: &Path, rate: Option<u64>) -> Result<Self, StoreError> {
        Ok(Self { inner: DirectoryObjects::create(directory)?, rate })
    }
}

impl Objects for Disk {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn get(&self, key: &str, limit_bytes: u64) -> Result<(Vec<u8>, Tag), StoreError> {
        self.inner.get(key, limit_bytes)
    }

    fn open(&self, key: &str) -> Result<Arc<dyn Blob>, StoreError> {
        self.inner.open(key)
    }

    fn put(&self, key: &str, bytes: &[u8], condition: Condition<'_>) -> Result<Tag, StoreError> {
        let began = Instant::now();
        let done = self.inner.put(key, bytes, condition)?;
        if let Some(rate) = self.rate {
            let due = Duration::from_secs_f64(bytes.len() as f64 / (rate as f64 * 1e6));
            std::thread::sleep(due.saturating_sub(began.elapsed()));
        }
        Ok(done)
    }

    fn upload(&self, key: &str) -> Result<Box<dyn Upload>, StoreError> {
        self.inner.upload(key)
    }

    fn list(
        &self,
        prefix: &str,
        visit: &mut dyn FnMut(Listed) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.inner.list(prefix, visit)
    }

    fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.inner.delete(key)
    }

    fn abort_uploads(&self, before: SystemTime) -> Result<u64, StoreError> {
        self.inner.abort_uploads(before)
    }
}
