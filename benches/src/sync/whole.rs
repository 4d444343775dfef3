//! A complete sync of a large guest with vhost devices.
//!
//! KVM's log is simulated: words are copied to a reused buffer, as GET_DIRTY_LOG does (*kvm* times the real
//! log). The vhost logs are real: shared memory that is filled from outside through the descriptor.

use std::fs::File;
use std::hint::black_box;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_ram::dirty::{Combined, LoggedRange, VhostLog};
use sterna_ram::{
    DirtyBitmaps, DirtyError, DirtySource, GuestRam, PAGE_SIZE, PageBitmap, RamBlock, SyncReport, SyncTimes,
};

use super::random::set_bits;
use super::table::{Table, time};
use super::{Args, Failed};

const SHARED: &str = "sync, one log shared";
const SEPARATE: &str = "sync, a log for each device";
const READING: &str = "plainly reading the separate logs";
const READING_THREADS: &str = "plainly reading them on two threads";
const DROPPING: &str = "dropping what is still to be sent";

/// Guest address at which memory continues after the hole for devices.
const ABOVE: u64 = 4 << 30;
/// Guest address at which the hole starts.
const BELOW: u64 = 3 << 30;

/// Two tables: a guest whose memory starts at a word of the bitmap, and one whose memory does not.
pub fn measure(args: &Args) -> Result<Vec<Table>, Failed> {
    Ok(vec![table(args, 0)?, table(args, 13)?])
}

/// A guest of one block, which sees the block's pages from `first_page` on.
fn table(args: &Args, first_page: u64) -> Result<Table, Failed> {
    let page = PAGE_SIZE as u64;
    let pages = (args.guest << 30) / page;
    let ram = GuestRam::new(vec![RamBlock::without_memory("pc.ram", (pages + 64) * page)?])?;
    let ranges = vec![
        LoggedRange { guest_address: 0, block: 0, first_page, pages: BELOW / page },
        LoggedRange {
            guest_address: ABOVE,
            block: 0,
            first_page: first_page + BELOW / page,
            pages: pages - BELOW / page,
        },
    ];
    let slots = Arc::new(Slots::new(&ranges));
    let shared = Arc::new(VhostLog::new(&ram, ranges.clone())?);
    let separate = (0..args.devices)
        .map(|_| VhostLog::new(&ram, ranges.clone()).map(Arc::new))
        .collect::<Result<Vec<_>, _>>()?;
    let with_shared = Combined::new(vec![slots.clone(), shared.clone()]);
    let mut all: Vec<Arc<dyn DirtySource>> = vec![slots.clone()];
    all.extend(separate.iter().map(|log| Arc::clone(log) as Arc<dyn DirtySource>));
    let with_separate = Combined::new(all);
    let read: Vec<Vec<u64>> = separate.iter().map(|log| vec![1; (log.len_bytes() / 8) as usize]).collect();

    let place = if first_page.is_multiple_of(64) { "aligned" } else { "misaligned" };
    let mut table = Table::new(format!(
        "sync: {} GiB {place}, {} devices, {} random pages dirty",
        args.guest, args.devices, args.dirty
    ));
    let mut random = fastrand::Rng::with_seed(2);
    let mut dirty = DirtyBitmaps::new(&ram);
    let sent = DirtyBitmaps::new(&ram);
    for run in 0..=args.runs {
        let mut push = |name, took| {
            if run > 0 {
                table.push(name, took);
            }
        };
        // The state of a round of which half has been sent.
        sent.clear_all();
        for _ in 0..args.dirty / 2 {
            sent.block(0).set(random.u64(..pages));
        }

        with_shared.start()?;
        slots.dirty(&mut random, args.dirty / 2);
        log_pages(&shared, &ranges, &mut random, args.dirty / 2)?;
        dirty.clear_all();
        let (took, report) = time(|| with_shared.sync(&mut dirty));
        let report = report?;
        assert_eq!(report.newly_dirty, dirty.count());
        push(SHARED, took);
        push_parts(&mut push, ["  kernel", "  vhost log", "  merging"], report.times);
        let (took, dropped) = time(|| dirty.drop_reported(&sent));
        black_box(dropped);
        push(DROPPING, took);
        with_shared.stop()?;

        with_separate.start()?;
        slots.dirty(&mut random, args.dirty / 2);
        for log in &separate {
            log_pages(log, &ranges, &mut random, args.dirty / 2 / args.devices)?;
        }
        dirty.clear_all();
        let (took, report) = time(|| with_separate.sync(&mut dirty));
        let report = report?;
        assert_eq!(report.newly_dirty, dirty.count());
        push(SEPARATE, took);
        push_parts(
            &mut push,
            ["  kernel (separate)", "  vhost logs (separate)", "  merging (separate)"],
            report.times,
        );
        with_separate.stop()?;

        push(READING, time(|| black_box(sum(&read))).0);
        let (one, other) = read.split_at(read.len() / 2);
        let both = || {
            std::thread::scope(|scope| {
                let other = scope.spawn(|| sum(other));
                sum(one).wrapping_add(other.join().unwrap_or(0))
            })
        };
        push(READING_THREADS, time(|| black_box(both())).0);
    }
    table.tell(SEPARATE, READING);
    table.tell(SEPARATE, READING_THREADS);
    Ok(table)
}

fn push_parts(push: &mut impl FnMut(&'static str, Duration), names: [&'static str; 3], times: SyncTimes) {
    push(names[0], times.kernel);
    push(names[1], times.vhost);
    push(names[2], times.aligned + times.misaligned);
}

fn sum(logs: &[Vec<u64>]) -> u64 {
    logs.iter().map(|words| words.iter().fold(0u64, |sum, word| sum ^ word)).fold(0, |sum, one| sum ^ one)
}

/// Writes a log as back ends do, but in one call. The log is clear, and no other writer uses it.
fn log_pages(
    log: &VhostLog,
    ranges: &[LoggedRange],
    random: &mut fastrand::Rng,
    count: u64,
) -> Result<(), Failed> {
    let mut words = vec![0u64; (log.len_bytes() / 8) as usize];
    let page = PAGE_SIZE as u64;
    let pages: u64 = ranges.iter().map(|range| range.pages).sum();
    for _ in 0..count {
        let at = random.u64(..pages);
        let guest = if at < ranges[0].pages { at } else { at - ranges[0].pages + ABOVE / page };
        words[(guest / 64) as usize] |= 1 << (guest % 64);
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    duplicate(log.file())?.write_all_at(&bytes, log.offset())?;
    Ok(())
}

fn duplicate(file: BorrowedFd<'_>) -> std::io::Result<File> {
    file.try_clone_to_owned().map(File::from)
}

/// Simulates KVM's slots: one for each range.
struct Slots(Mutex<Kept>);

struct Kept {
    /// The kernel's log of each slot.
    logs: Vec<(LoggedRange, Vec<u64>)>,
    /// The buffer to which a log is copied.
    buffer: Vec<u64>,
}

impl Slots {
    fn new(ranges: &[LoggedRange]) -> Self {
        let words = |range: &LoggedRange| range.pages.div_ceil(64) as usize;
        let logs = ranges.iter().map(|range| (*range, vec![0; words(range)])).collect();
        let buffer = vec![1; ranges.iter().map(words).max().unwrap_or(0)];
        Slots(Mutex::new(Kept { logs, buffer }))
    }

    /// Makes `count` new random pages dirty, and no others.
    fn dirty(&self, random: &mut fastrand::Rng, count: u64) {
        let mut kept = self.0.lock();
        let all: u64 = kept.logs.iter().map(|(range, _)| range.pages).sum();
        for (range, words) in &mut kept.logs {
            words.fill(0);
            set_bits(random, words, range.pages, count * range.pages / all);
        }
    }
}

impl DirtySource for Slots {
    fn start(&self) -> Result<(), DirtyError> {
        Ok(())
    }
    fn stop(&self) -> Result<(), DirtyError> {
        Ok(())
    }
    fn sync(&self, into: &mut DirtyBitmaps) -> Result<SyncReport, DirtyError> {
        let mut kept = self.0.lock();
        let Kept { logs, buffer } = &mut *kept;
        let mut report = SyncReport::default();
        for (range, words) in logs {
            let began = Instant::now();
            let buffer = &mut buffer[..words.len()];
            buffer.copy_from_slice(words);
            let copied = Instant::now();
            report.newly_dirty += into.block_mut(range.block).merge_words(range.first_page, buffer);
            report.times.kernel += copied - began;
            report.times.misaligned += copied.elapsed();
        }
        Ok(report)
    }
    fn rearm(&self, _: usize, _: u64, _: u64, _: &PageBitmap) -> Result<(), DirtyError> {
        Ok(())
    }
    fn name(&self) -> &'static str {
        "slots"
    }
}
