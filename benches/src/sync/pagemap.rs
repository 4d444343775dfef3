//! Measures userfaultfd with PAGEMAP_SCAN.

use sterna_ram::dirty::UffdDirtyLog;
use sterna_ram::{Backing, DirtyBitmaps, DirtySource, GuestRam, PAGE_SIZE, RamBlock};

use super::table::{Table, time};
use super::{Args, Failed, skipped};

/// Patterns of the pages that are written between two syncs.
const PATTERNS: [(&str, &str, Pattern); 3] = [
    ("sync, every 8th page", "system calls alone, every 8th page", Pattern::Every(8)),
    ("sync, a random quarter", "system calls alone, a random quarter", Pattern::Random(4)),
    ("sync, nothing written", "system calls alone, nothing written", Pattern::None),
];

#[derive(Clone, Copy)]
enum Pattern {
    Every(u64),
    Random(u64),
    None,
}

pub fn measure(args: &Args) -> Result<Option<Table>, Failed> {
    if !UffdDirtyLog::is_supported() {
        skipped("pagemap", "this kernel has no PAGEMAP_SCAN with asynchronous write protection");
        return Ok(None);
    }
    let block = RamBlock::new("ram", args.pagemap << 20, Backing::Memfd)?;
    block.populate(0, block.pages())?;
    let ram = GuestRam::new(vec![block])?;
    let log = UffdDirtyLog::new(ram.clone());
    log.start()?;
    let mut dirty = DirtyBitmaps::new(&ram);
    log.sync(&mut dirty)?;
    let mut table = Table::new(format!("pagemap: {} MiB under userfaultfd", args.pagemap));
    for run in 0..=args.runs {
        for (ours, alone, pattern) in PATTERNS {
            // Both variants scan the same pages. The order alternates, because the second variant finds
            // warmer caches.
            let order = if run % 2 == 0 { [ours, alone] } else { [alone, ours] };
            for name in order {
                let written = write(&ram, pattern, run as u64)?;
                dirty.clear_all();
                let took = if name == ours {
                    let (took, report) = time(|| log.sync(&mut dirty));
                    assert_eq!(report?.newly_dirty, written);
                    took
                } else {
                    let (took, found) = time(|| log.system_calls_alone());
                    found?;
                    took
                };
                if run > 0 {
                    table.push(name, took);
                }
            }
        }
    }
    for (ours, alone, _) in PATTERNS {
        table.tell(ours, alone);
    }
    Ok(Some(table))
}

/// Writes pages, and returns their number.
fn write(ram: &GuestRam, pattern: Pattern, seed: u64) -> Result<u64, Failed> {
    let block = ram.block(0);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut written = 0;
    for page in 0..block.pages() {
        let wanted = match pattern {
            Pattern::Every(step) => page % step == 0,
            Pattern::Random(of) => random.u64(..of) == 0,
            Pattern::None => false,
        };
        if wanted {
            block.write_u64(page * PAGE_SIZE as u64, page)?;
            written += 1;
        }
    }
    Ok(written)
}
