//! Tracks which blocks of a disk must still be copied.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use sterna::AskCheckpoint;
use vmm_sys_util::eventfd::EventFd;

/// Size of a block in bytes.
pub(super) const BLOCK: u64 = 64 << 10;

/// One bit per block. While no copy is in progress, no block is recorded, and there are no bits.
pub(super) struct Changes {
    is_tracking: AtomicBool,
    bits: RwLock<Bits>,
    /// Number of recorded blocks.
    count: AtomicU64,
    /// Highest number of recorded blocks of a protected guest.
    limit: AtomicU64,
    /// Requests the checkpoint that takes the recorded blocks. Called once until some are taken.
    ask: Mutex<Option<AskCheckpoint>>,
    has_asked: AtomicBool,
    /// Readable when there may be room again.
    room: EventFd,
}

#[derive(Default)]
struct Bits {
    words: Vec<AtomicU64>,
    /// The disk's length in bytes.
    len_bytes: u64,
}

impl Changes {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            is_tracking: AtomicBool::new(false),
            bits: RwLock::default(),
            count: AtomicU64::new(0),
            limit: AtomicU64::new(u64::MAX),
            ask: Mutex::new(None),
            has_asked: AtomicBool::new(false),
            room: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
        })
    }

    /// Starts to record writes to a disk of `len_bytes` bytes. No block is recorded yet.
    pub(super) fn track(&self, len_bytes: u64) {
        let words = len_bytes.div_ceil(BLOCK).div_ceil(64);
        let words = (0..words).map(|_| AtomicU64::new(0)).collect();
        self.unlimit();
        let mut bits = self.bits.write();
        *bits = Bits { words, len_bytes };
        self.count.store(0, Ordering::SeqCst);
        drop(bits);
        self.is_tracking.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_tracking(&self) -> bool {
        self.is_tracking.load(Ordering::SeqCst)
    }

    pub(super) fn end(&self) {
        self.is_tracking.store(false, Ordering::SeqCst);
        let mut bits = self.bits.write();
        *bits = Bits::default();
        self.count.store(0, Ordering::SeqCst);
        drop(bits);
        self.unlimit();
    }

    /// Limits the recorded blocks to `limit_bytes`, plus a request or two. At the limit, the disk calls
    /// `ask`, and its requests wait.
    pub(super) fn limit(&self, limit_bytes: u64, ask: AskCheckpoint) {
        *self.ask.lock() = Some(ask);
        self.has_asked.store(false, Ordering::SeqCst);
        self.limit.store((limit_bytes / BLOCK).max(1), Ordering::SeqCst);
    }

    fn unlimit(&self) {
        self.limit.store(u64::MAX, Ordering::SeqCst);
        *self.ask.lock() = None;
        self.tell_of_room();
    }

    /// Whether the guest may write more. If not, it requests a checkpoint, and [`Changes::room`] becomes
    /// readable once there is room.
    pub(super) fn have_room(&self) -> bool {
        if self.count.load(Ordering::SeqCst) < self.limit.load(Ordering::SeqCst) {
            return true;
        }
        if !self.has_asked.swap(true, Ordering::SeqCst) {
            let ask = self.ask.lock().clone();
            ask.inspect(|ask| ask());
        }
        // Blocks may have been taken since the first check.
        self.count.load(Ordering::SeqCst) < self.limit.load(Ordering::SeqCst)
    }

    /// An event that becomes readable when there may be room after there was none. It can become readable
    /// several times.
    pub(super) fn room(&self) -> BorrowedFd<'_> {
        // SAFETY: `self` keeps the event open, and is borrowed for as long as the result.
        unsafe { BorrowedFd::borrow_raw(self.room.as_raw_fd()) }
    }

    fn tell_of_room(&self) {
        // The write cannot fail, because the counter is far from its maximum.
        let _ = self.room.write(1);
    }

    /// Records a completed write of the guest. Must be called after the write, because the copy may have read
    /// the block before it.
    pub(super) fn written(&self, start: u64, length: u64) {
        if self.is_tracking() {
            self.note(start, length);
        }
    }

    /// Records the blocks that contain these bytes.
    pub(super) fn note(&self, start: u64, length: u64) {
        let bits = self.bits.read();
        let end = start.saturating_add(length).min(bits.len_bytes);
        for block in start / BLOCK..end.div_ceil(BLOCK) {
            let before = bits.words[block as usize / 64].fetch_or(1 << (block % 64), Ordering::SeqCst);
            self.count.fetch_add(u64::from(before >> (block % 64) & 1 == 0), Ordering::SeqCst);
        }
    }

    /// Takes the first recorded block at or after block `from`. Returns its number, first byte and length.
    pub(super) fn take(&self, from: u64) -> Option<(u64, u64, u64)> {
        let bits = self.bits.read();
        let first = from as usize / 64;
        for (index, word) in bits.words.iter().enumerate().skip(first) {
            let mask = if index == first { u64::MAX << (from % 64) } else { u64::MAX };
            let found = word.load(Ordering::SeqCst) & mask;
            if found != 0 {
                let bit = found.trailing_zeros();
                // The bit is cleared before the block is read, so that a later write records the block again.
                word.fetch_and(!(1 << bit), Ordering::SeqCst);
                let was_full = self.count.fetch_sub(1, Ordering::SeqCst) >= self.limit.load(Ordering::SeqCst);
                self.has_asked.store(false, Ordering::SeqCst);
                if was_full {
                    self.tell_of_room();
                }
                let block = index as u64 * 64 + u64::from(bit);
                let start = block * BLOCK;
                return Some((block, start, BLOCK.min(bits.len_bytes - start)));
            }
        }
        None
    }

    /// Bytes of the recorded blocks.
    pub(super) fn bytes(&self) -> u64 {
        let bits = self.bits.read();
        (self.count.load(Ordering::SeqCst) * BLOCK).min(bits.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_taken_in_order_and_once() {
        let changes = Changes::new().unwrap();
        changes.written(0, 512);
        assert_eq!(changes.bytes(), 0, "nobody copies");
        changes.track(70 * BLOCK + 512);
        changes.written(3 * BLOCK - 1, 2);
        changes.written(70 * BLOCK, 512);
        changes.written(65 * BLOCK, BLOCK);

        assert_eq!(changes.bytes(), 4 * BLOCK);
        assert_eq!(changes.take(3), Some((3, 3 * BLOCK, BLOCK)));
        assert_eq!(changes.take(4), Some((65, 65 * BLOCK, BLOCK)));
        assert_eq!(changes.take(66), Some((70, 70 * BLOCK, 512)));
        assert_eq!((changes.take(66), changes.take(0)), (None, Some((2, 2 * BLOCK, BLOCK))));
        assert_eq!(changes.take(0), None);
    }
    #[test]
    fn more_than_the_limit_waits_for_the_checkpoint_that_it_asks_for() {
        use std::sync::Arc;
        let changes = Changes::new().unwrap();
        changes.track(100 * BLOCK);
        let asked = Arc::<AtomicU64>::default();
        let asks = Arc::clone(&asked);
        let ask = Arc::new(move || {
            asks.fetch_add(1, Ordering::SeqCst);
        });
        changes.limit(2 * BLOCK, ask);
        changes.room.read().unwrap();
        // A block that is written twice is recorded once.
        changes.written(0, BLOCK);
        changes.written(0, BLOCK);
        assert!(changes.have_room());
        changes.written(50 * BLOCK, BLOCK);
        assert!(!changes.have_room() && !changes.have_room());
        assert_eq!((asked.load(Ordering::SeqCst), changes.bytes()), (1, 2 * BLOCK));
        assert!(changes.room.read().is_err(), "there is none yet");

        changes.take(0);
        assert!(changes.have_room() && changes.room.read().is_ok());
        changes.written(0, 1);
        assert!(!changes.have_room());
        assert_eq!(asked.load(Ordering::SeqCst), 2);
        changes.end();
        assert!(changes.have_room() && changes.room.read().is_ok(), "nobody is protected any more");
    }
}
