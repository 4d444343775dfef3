//! Reads large parts of a file, from the page cache or with direct I/O.
//!
//! An image is read once. To fill the page cache with it costs more time than the disk does. But data that is already
//! cached is read several times as fast from memory. Samples show which case applies: a read with `RWF_NOWAIT`
//! succeeds only from the cache.
//!
//! The samples are few and as far apart as the data allows, because a sample that is not cached makes the kernel read
//! its page. Plain reads replace direct I/O if the file system does not support it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use rustix::fs::{Advice, OFlags, SeekFrom};
use rustix::io::{Errno, IoSliceMut, ReadWriteFlags};

use crate::read::ReadAt;

/// Alignment of offsets, lengths and buffers that direct I/O requires, in bytes.
const ALIGNMENT: usize = 4096;
/// Number of places whose presence in the page cache is tested.
const SAMPLES: u64 = 32;

/// Reads a source in large pieces. Several threads may use it.
pub struct Reading<'a> {
    source: &'a dyn ReadAt,
    extents: Vec<(u64, u64)>,
    /// The file opened for direct I/O; none if most of the file is cached.
    direct: Option<File>,
}

/// A buffer with the alignment that direct I/O requires.
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Buffer {
    /// Makes a buffer of `length` bytes.
    pub fn new(length: usize) -> Self {
        let bytes = vec![0u8; length + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { bytes, start, length }
    }

    /// Returns the first `count` bytes.
    pub fn first(&self, count: usize) -> &[u8] {
        &self.bytes[self.start..self.start + count.min(self.length)]
    }

    fn first_mut(&mut self, count: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + count.min(self.length)]
    }
}

impl<'a> Reading<'a> {
    /// Prepares to read the first `length` bytes of `source`.
    pub fn new(source: &'a dyn ReadAt, length: u64) -> Self {
        let file = source.file();
        let extents = Self::extents(source, length);
        let direct =
            file.filter(|file| !is_cached(file, &extents)).and_then(|file| open(file, OFlags::DIRECT));
        Self { source, extents, direct }
    }

    /// Ranges with data in the first `length` bytes of `source`, in ascending order.
    ///
    /// One range covers all bytes if the source cannot report holes.
    pub fn extents(source: &dyn ReadAt, length: u64) -> Vec<(u64, u64)> {
        source.file().and_then(|file| data(file, length)).unwrap_or_else(|| vec![(0, length)])
    }

    /// Reads `count` bytes from `offset`. Returns the number of bytes, which is smaller only at the end of the file.
    ///
    /// Both values should be multiples of the page size.
    ///
    /// # Errors
    /// An error of the system.
    pub fn read(&self, offset: u64, count: usize, buffer: &mut Buffer) -> io::Result<usize> {
        let to = buffer.first_mut(count);
        if let Some(direct) = &self.direct
            && let Some(got) = read_direct(direct, offset, to)?
        {
            return Ok(got);
        }
        let mut done = 0;
        while done < to.len() {
            match self.source.read_at(offset + done as u64, &mut to[done..])? {
                0 => break,
                got => done += got,
            }
        }
        Ok(done)
    }

    /// Ranges of the file with data, in ascending order.
    ///
    /// One range covers the whole file if the file system cannot report holes.
    pub fn data(&self) -> &[(u64, u64)] {
        &self.extents
    }
}

/// Opens the same file again, even if its path now leads to another file.
fn open(file: &File, flags: OFlags) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path).ok()
}

/// Whether most of the file is in the page cache.
fn is_cached(file: &File, extents: &[(u64, u64)]) -> bool {
    // A separate descriptor with `Advice::Random`: a sample that is not cached then reads one page and no read-ahead.
    let Some(file) = open(file, OFlags::empty()) else { return true };
    let _ = rustix::fs::fadvise(&file, 0, None, Advice::Random);
    let total: u64 = extents.iter().map(|(start, end)| end - start).sum();
    let (mut there, mut asked) = (0, 0);
    let mut before = 0;
    let mut next = 0;
    for (start, end) in extents {
        while next < SAMPLES && total * next / SAMPLES < before + (end - start) {
            let at = (start + total * next / SAMPLES - before) / ALIGNMENT as u64 * ALIGNMENT as u64;
            let mut byte = [0];
            let got =
                rustix::io::preadv2(&file, &mut [IoSliceMut::new(&mut byte)], at, ReadWriteFlags::NOWAIT);
            there += u64::from(got == Ok(1));
            asked += 1;
            next += 1;
        }
        before += end - start;
    }
    there * 2 >= asked
}

/// Reads with direct I/O; `None` if the file system does not support it.
fn read_direct(direct: &File, offset: u64, to: &mut [u8]) -> io::Result<Option<usize>> {
    let mut done = 0;
    while done < to.len() {
        match FileExt::read_at(direct, &mut to[done..], offset + done as u64) {
            Ok(0) => break,
            // Only the end of the file causes an unaligned count.
            Ok(got) => {
                done += got;
                if got % ALIGNMENT != 0 {
                    break;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    Ok(Some(done))
}

fn data(file: &File, length: u64) -> Option<Vec<(u64, u64)>> {
    let mut stretches = Vec::new();
    let mut at = 0;
    while at < length {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(_) => return None,
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start)).ok()?.min(length);
        if end <= start {
            break;
        }
        stretches.push((start, end));
        at = end;
    }
    Some(stretches)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_file_with_holes_gives_its_bytes_and_its_data() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(3 << 20).unwrap();
        file.write_all_at(&[7; 5000], 1 << 20).unwrap();
        let reading = Reading::new(&file, 3 << 20);
        let mut buffer = Buffer::new(1 << 20);

        let got = reading.read(1 << 20, 1 << 20, &mut buffer).unwrap();
        let end = reading.read((3 << 20) - 4096, 1 << 20, &mut Buffer::new(1 << 20)).unwrap();

        assert_eq!((got, end), (1 << 20, 4096));
        assert!(buffer.first(5000).iter().all(|byte| *byte == 7) && buffer.first(5001)[5000] == 0);
        let data = reading.data();
        assert!(data.iter().any(|(start, end)| *start <= 1 << 20 && *end >= (1 << 20) + 5000), "{data:?}");
    }
}
