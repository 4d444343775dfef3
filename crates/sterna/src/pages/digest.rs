//! Where received pages go when only their digest matters: dry runs, checks of a stream.
//!
//! The digest of a RAM is independent of the order and the channels in which pages came.

use std::collections::HashMap;

use parking_lot::{Condvar, Mutex};
use sterna_ram::{Backing, DirtyBitmaps, GuestRam, PAGE_SIZE, PageBitmap, RamBlock, RamSlice};
use xxhash_rust::xxh3::xxh3_128;

use super::PageSink;
use crate::error::MigrationError;
use crate::order::PageRun;

/// Pages that one scratch buffer holds: those of a packet, the most that a lane prepares at once.
const SCRATCH_PAGES: u64 = 128;

/// Keeps a digest of every page and none of their bytes.
pub struct DigestSink {
    received: DirtyBitmaps,
    /// Per block, per page; absent pages count as zero pages.
    digests: Vec<Mutex<HashMap<u64, u128>>>,
    scratch: Vec<RamBlock>,
    pool: Mutex<Pool>,
    returned: Condvar,
}

#[derive(Default)]
struct Pool {
    free: Vec<usize>,
    lent: HashMap<(usize, u64), usize>,
}

impl DigestSink {
    /// A sink for a RAM of `ram`'s shape that `lanes` lanes write at once.
    pub fn new(ram: &GuestRam, lanes: usize) -> Result<Self, MigrationError> {
        let bytes = SCRATCH_PAGES * PAGE_SIZE as u64;
        let scratch = (0..lanes * SCRATCH_PAGES as usize)
            .map(|i| RamBlock::new(format!("scratch{i}"), bytes, Backing::Anonymous))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            received: DirtyBitmaps::new(ram),
            digests: ram.blocks().iter().map(|_| Mutex::default()).collect(),
            pool: Mutex::new(Pool { free: (0..scratch.len()).collect(), lent: HashMap::new() }),
            scratch,
            returned: Condvar::new(),
        })
    }

    /// The digest of all that came, comparable with [`digest_of`].
    pub fn digest(&self) -> u128 {
        let pages = self.digests.iter().map(|block| {
            let mut pages: Vec<_> = block.lock().iter().map(|(page, digest)| (*page, *digest)).collect();
            pages.sort_unstable();
            pages
        });
        combine(pages)
    }

    /// The pages of block `block` that came so far, with content or as zero.
    pub fn received(&self, block: usize) -> &PageBitmap {
        self.received.block(block)
    }

    fn lent(&self, run: PageRun) -> Option<usize> {
        self.pool.lock().lent.remove(&(run.block, run.first))
    }
}

impl PageSink for DigestSink {
    fn prepare(&self, run: PageRun) -> Result<RamSlice<'_>, MigrationError> {
        let mut pool = self.pool.lock();
        let index = loop {
            match pool.free.pop() {
                Some(index) => break index,
                None => self.returned.wait(&mut pool),
            }
        };
        pool.lent.insert((run.block, run.first), index);
        drop(pool);
        Ok(self.scratch[index].slice(0, run.count as usize * PAGE_SIZE)?)
    }

    fn commit(&self, run: PageRun) -> Result<(), MigrationError> {
        let Some(index) = self.lent(run) else {
            return Err(MigrationError::Internal(format!("commit of {run:?}, which was not prepared")));
        };
        let mut page = vec![0; PAGE_SIZE];
        let mut digests = self.digests[run.block].lock();
        for i in 0..run.count {
            self.scratch[index].read(i * PAGE_SIZE as u64, &mut page)?;
            set(&mut digests, run.first + i, &page);
        }
        drop(digests);
        self.received.block(run.block).set_range(run.first, run.count);
        self.pool.lock().free.push(index);
        self.returned.notify_one();
        Ok(())
    }

    fn zero(&self, run: PageRun) -> Result<(), MigrationError> {
        let mut digests = self.digests[run.block].lock();
        for page in run.first..run.end() {
            digests.remove(&page);
        }
        drop(digests);
        self.received.block(run.block).set_range(run.first, run.count);
        Ok(())
    }

    fn current(&self, run: PageRun, _: &mut [u8]) -> Result<(), MigrationError> {
        let what = format!(
            "pages {} of {:?} as a difference (XBZRLE), and only digests are kept",
            run.count, run.block
        );
        Err(MigrationError::PeerIncompatible { what })
    }
}

/// The digest of a RAM as it stands; the guest must be stopped.
pub fn digest_of(ram: &GuestRam) -> Result<u128, MigrationError> {
    let mut blocks = Vec::new();
    let mut page = vec![0; PAGE_SIZE];
    for block in ram.blocks() {
        let absent = PageBitmap::new(block.pages());
        block.mark_absent(0, block.pages(), &absent)?;
        let mut digests = HashMap::new();
        for index in (0..block.pages()).filter(|&index| !absent.get(index)) {
            block.read(index * PAGE_SIZE as u64, &mut page)?;
            set(&mut digests, index, &page);
        }
        let mut pages: Vec<_> = digests.into_iter().collect();
        pages.sort_unstable();
        blocks.push(pages);
    }
    Ok(combine(blocks.into_iter()))
}

/// Only pages with content have an entry, so that zero and absent are the same.
fn set(digests: &mut HashMap<u64, u128>, page: u64, content: &[u8]) {
    if content.iter().all(|&byte| byte == 0) {
        digests.remove(&page);
    } else {
        digests.insert(page, xxh3_128(content));
    }
}

fn combine(blocks: impl Iterator<Item = Vec<(u64, u128)>>) -> u128 {
    let mut all = Vec::new();
    for (block, pages) in blocks.enumerate() {
        for (page, digest) in pages {
            all.extend_from_slice(&(block as u64).to_le_bytes());
            all.extend_from_slice(&page.to_le_bytes());
            all.extend_from_slice(&digest.to_le_bytes());
        }
    }
    xxh3_128(&all)
}
