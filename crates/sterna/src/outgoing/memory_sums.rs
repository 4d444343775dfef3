//! Checksums of guest memory, which find a write after the last sync.

use std::hash::{DefaultHasher, Hasher};

use sterna_ram::{GuestRam, PAGE_SIZE, PageBitmap, Run};

use crate::error::MigrationError;

/// Pages that are read together.
const PIECE_PAGES: u64 = 256;
/// The sum of an absent page. It reads as zero, but is not read, because that would populate it.
const ABSENT: u64 = 0;

/// A checksum of each page of the guest's memory.
pub(super) struct Sums(Vec<Vec<u64>>);

impl Sums {
    pub(super) fn of(ram: &GuestRam) -> Result<Self, MigrationError> {
        let mut buffer = vec![0; PIECE_PAGES as usize * PAGE_SIZE];
        let mut sums = Vec::with_capacity(ram.blocks().len());
        for block in ram.blocks() {
            let absent = PageBitmap::new(block.pages());
            block.mark_absent(0, block.pages(), &absent)?;
            let present = PageBitmap::new(block.pages());
            present.set_all();
            for run in runs(&absent) {
                present.clear_range(run.first, run.count);
            }
            let mut of_block = vec![ABSENT; block.pages() as usize];
            for run in runs(&present) {
                let bytes = &mut buffer[..run.count as usize * PAGE_SIZE];
                block.read(run.first * PAGE_SIZE as u64, bytes)?;
                let pages = of_block[run.first as usize..].iter_mut();
                for (sum, page) in pages.zip(bytes.chunks_exact(PAGE_SIZE)) {
                    *sum = sum_of(page);
                }
            }
            sums.push(of_block);
        }
        Ok(Self(sums))
    }

    pub(super) fn compare(&self, ram: &GuestRam) -> Result<(), MigrationError> {
        let now = Self::of(ram)?;
        for (block, (before, now)) in ram.blocks().iter().zip(self.0.iter().zip(&now.0)) {
            let mut changed = (0..).zip(before.iter().zip(now)).filter(|(_, (before, now))| before != now);
            if let Some((first_page, _)) = changed.next() {
                let pages = 1 + changed.count() as u64;
                return Err(MigrationError::ChangedAfterLastSync {
                    block: block.name().to_owned(),
                    first_page,
                    pages,
                });
            }
        }
        Ok(())
    }
}

/// The runs of set bits, in pieces.
fn runs(bitmap: &PageBitmap) -> impl Iterator<Item = Run> + '_ {
    let mut from = 0;
    std::iter::from_fn(move || {
        let run = bitmap.next_run(from, bitmap.pages(), PIECE_PAGES)?;
        from = run.end();
        Some(run)
    })
}

/// A zero page has the sum of an absent one: it may have been read in between, which populates it.
fn sum_of(page: &[u8]) -> u64 {
    if page.iter().all(|byte| *byte == 0) {
        return ABSENT;
    }
    let mut hasher = DefaultHasher::new();
    hasher.write(page);
    hasher.finish().max(ABSENT + 1)
}
