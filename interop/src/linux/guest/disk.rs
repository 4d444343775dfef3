//! The guest's work on its disk: it writes block after block, syncs some of them, and reads others back.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use super::content;
use crate::Failure;
use crate::scenarios::ensure;

const BLOCK: usize = 64 << 10;
/// Number of blocks that are written in turn.
const BLOCKS: u64 = 64;
/// Alignment of reads that bypass the cache.
const ALIGNMENT: usize = 4096;
/// Interval of steps that wait until the written data is on the disk.
const SYNC_EVERY: u64 = 4;

/// The disk, and the number of errors on it.
pub(in crate::linux) struct Disk {
    file: File,
    /// A descriptor that bypasses the guest's cache.
    direct: File,
    /// Number of the step that last wrote each block; 0: none.
    written: Vec<u64>,
    wrong: usize,
}

impl Disk {
    /// Opens the disk. Ends the guest if it does not exist.
    pub(super) fn open(device: &str) -> Self {
        let open = |flags| {
            let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(device);
            file.unwrap_or_else(|error| panic!("{device}: {error}"))
        };
        Self { file: open(0), direct: open(libc::O_DIRECT), written: vec![0; BLOCKS as usize], wrong: 0 }
    }

    /// Writes a block, and reads another one that was written long before.
    pub(super) fn step(&mut self, number: u64) {
        let block = number % BLOCKS;
        self.wrong += usize::from(self.file.write_all_at(&content(number, BLOCK), place(block)).is_err());
        self.written[block as usize] = number;
        if number.is_multiple_of(SYNC_EVERY) {
            self.wrong += usize::from(self.file.sync_data().is_err());
            // This block is on the disk, because it was written before the sync.
            self.look(number - SYNC_EVERY + 1);
        }
    }

    /// Reads all blocks again. Returns the number of wrong blocks.
    pub(super) fn finish(mut self) -> usize {
        self.wrong += usize::from(self.file.sync_all().is_err());
        let written: Vec<u64> = self.written.iter().copied().filter(|number| *number > 0).collect();
        written.into_iter().for_each(|number| self.look(number));
        self.wrong
    }

    fn look(&mut self, number: u64) {
        let mut bytes = vec![0; BLOCK + ALIGNMENT];
        let from = bytes.as_ptr().align_offset(ALIGNMENT);
        let bytes = &mut bytes[from..from + BLOCK];
        let is_read = self.direct.read_exact_at(bytes, place(number % BLOCKS)).is_ok();
        self.wrong += usize::from(!is_read || bytes != content(number, BLOCK));
    }
}

/// Checks the disk from outside, after the guest has ended. Each block must have the content of its last
/// write.
pub(in crate::linux) fn check(image: &Path, steps: u64) -> Result<(), Failure> {
    let bytes = std::fs::read(image).map_err(|error| error.to_string())?;
    for number in (steps + 1).saturating_sub(BLOCKS).max(1)..=steps {
        let at = place(number % BLOCKS) as usize;
        ensure(bytes[at..at + BLOCK] == content(number, BLOCK), || {
            format!("block {} is wrong", number % BLOCKS)
        })?;
    }
    Ok(())
}

fn place(block: u64) -> u64 {
    block * BLOCK as u64
}
