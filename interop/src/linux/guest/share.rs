//! The guest's work in a directory of the host (virtiofs): it writes numbers to a file that stays open, and
//! reads them back.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use rustix::mount::MountFlags;

use crate::lab::mount;
use crate::scenarios::{Failure, ensure};

/// The tag by which the guest mounts the directory.
pub(in crate::linux) const TAG: &str = "share";
const AT: &str = "/m";
const NAME: &str = "numbers";

/// The directory, and the number of errors in it.
pub(super) struct Share {
    file: File,
    written: u64,
    wrong: usize,
}

impl Share {
    /// Mounts the directory. Ends the guest if it does not exist.
    pub(super) fn open() -> Self {
        mount(TAG, "virtiofs", AT, MountFlags::empty(), "").unwrap_or_else(|why| panic!("{why}"));
        let options = File::options().read(true).write(true).create(true).truncate(true).clone();
        let file = options.open(Path::new(AT).join(NAME)).unwrap_or_else(|error| panic!("{NAME}: {error}"));
        Self { file, written: 0, wrong: 0 }
    }

    /// Appends a number and reads the first half of all numbers. Also makes and removes another file.
    pub(super) fn step(&mut self, number: u64) {
        let other = Path::new(AT).join(number.to_string());
        let done = self.file.seek(SeekFrom::End(0)).and_then(|_| self.file.write_all(&number.to_le_bytes()));
        let done = done.and_then(|()| self.file.sync_data()).and_then(|()| std::fs::write(&other, NAME));
        let is_there = std::fs::read(&other).is_ok_and(|bytes| bytes == NAME.as_bytes());
        let done = done.and_then(|()| std::fs::remove_file(&other));
        self.written = number;
        self.wrong += usize::from(done.is_err() || !is_there || !self.holds(number / 2));
    }

    /// Returns the number of errors.
    pub(super) fn finish(mut self) -> usize {
        let is_whole = self.holds(self.written);
        self.wrong + usize::from(!is_whole)
    }

    fn holds(&mut self, count: u64) -> bool {
        let mut bytes = vec![0; count as usize * 8];
        let read = self.file.rewind().and_then(|()| self.file.read_exact(&mut bytes));
        read.is_ok() && bytes == content(count)
    }
}

/// Checks the directory from outside, after the guest has ended. It must contain every number and nothing
/// else.
pub(in crate::linux) fn check(directory: &Path, steps: u64) -> Result<(), Failure> {
    let failed = |error: std::io::Error| error.to_string();
    let names: Vec<PathBuf> =
        std::fs::read_dir(directory).map_err(failed)?.flatten().map(|entry| entry.path()).collect();
    ensure(names == [directory.join(NAME)], || format!("the directory holds {names:?}"))?;
    let bytes = std::fs::read(&names[0]).map_err(failed)?;
    ensure(bytes == content(steps), || format!("{} bytes are not {steps} numbers", bytes.len()))
}

fn content(count: u64) -> Vec<u8> {
    (1..=count).flat_map(u64::to_le_bytes).collect()
}
