//! Checks whether a file is in the page cache. If so, reading past the page cache is slower.

use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::AsFd;

use rustix::fs::{SeekFrom, fstatfs, seek};
use rustix::io::{ReadWriteFlags, preadv2};

/// Number of places in the file that are checked.
const SAMPLES: u64 = 32;
const TMPFS: u64 = 0x0102_1994;

/// Whether most of `file` can be read without disk access. Checks only places with data: holes need no disk.
pub(super) fn is_cached(file: &File) -> bool {
    if fstatfs(file.as_fd()).is_ok_and(|system| system.f_type as u64 == TMPFS) {
        return true;
    }
    let length = file.metadata().map_or(0, |there| there.len());
    let (mut looked, mut found) = (0, 0);
    for sample in 0..SAMPLES {
        // Divide first: for a file of 2^59 bytes the product would overflow.
        let Ok(at) = seek(file, SeekFrom::Data(length / SAMPLES * sample)) else { continue };
        looked += 1;
        let mut byte = [0];
        let read = preadv2(file, &mut [IoSliceMut::new(&mut byte)], at, ReadWriteFlags::NOWAIT);
        found += u64::from(read.is_ok_and(|count| count == 1));
    }
    looked > 0 && found * 4 >= looked * 3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_cached_of_what_was_just_written_is_true() {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &[1; 1 << 20]).unwrap();

        assert!(is_cached(&file));
    }

    #[test]
    fn is_cached_of_nothing_is_false_or_tmpfs() {
        let file = tempfile::tempfile().unwrap();

        let is_tmpfs = fstatfs(file.as_fd()).is_ok_and(|system| system.f_type as u64 == TMPFS);
        assert_eq!(is_cached(&file), is_tmpfs);
    }
}
