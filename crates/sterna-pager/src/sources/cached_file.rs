//! A file that is read from the page cache without waiting, or with waiting.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use rustix::fs::fstatfs;
use rustix::io::{Errno, ReadWriteFlags, preadv2};

/// Length of a frame of sources that can read any page by itself: 64 KiB.
pub(super) const FRAME_BYTES: u64 = 64 << 10;
/// Number of tmpfs in `statfs`.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A file, and how it can be read without a wait.
pub(super) struct CachedFile {
    file: File,
    now: Now,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Now {
    /// The kernel says whether the bytes are in the page cache.
    Asked,
    /// The file is in memory.
    Always,
    Never,
}

impl CachedFile {
    pub(super) fn new(file: File) -> Self {
        let mut byte = [0];
        let asked = preadv2(&file, &mut [IoSliceMut::new(&mut byte)], 0, ReadWriteFlags::NOWAIT);
        let now = match asked {
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                let is_tmpfs = fstatfs(file.as_fd()).is_ok_and(|status| status.f_type as u64 == TMPFS_MAGIC);
                if is_tmpfs { Now::Always } else { Now::Never }
            }
            _ => Now::Asked,
        };
        Self { file, now }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Fills `to` if the bytes are in memory; otherwise returns `false`.
    pub(super) fn read_now(&self, offset: u64, to: &mut [u8]) -> io::Result<bool> {
        match self.now {
            Now::Never => Ok(false),
            Now::Always => self.read(offset, to).map(|()| true),
            Now::Asked => {
                let length = to.len();
                match preadv2(&self.file, &mut [IoSliceMut::new(to)], offset, ReadWriteFlags::NOWAIT) {
                    Ok(count) => Ok(count == length),
                    // Any failure is reported by the read that waits.
                    Err(_) => Ok(false),
                }
            }
        }
    }

    /// Fills `to`.
    pub(super) fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(to, offset)
    }
}
