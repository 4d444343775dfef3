//! Reading much of a file once: from the page cache if it is there, else past it.
//!
//! An image is read once, so filling the page cache with it costs more than the disk does; but what is there
//! already comes from memory several times as fast. Samples tell which it is: a read that must not wait
//! (`RWF_NOWAIT`) succeeds only from the cache. They are few and as far apart as the data, since a sample that
//! is not there makes the kernel fetch its page. Where the file system has no direct I/O, plain reads do.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use rustix::fs::{Advice, OFlags, SeekFrom};
use rustix::io::{Errno, IoSliceMut, ReadWriteFlags};

use crate::read::ReadAt;

/// What direct I/O wants offsets, lengths and buffers to be multiples of.
const ALIGNMENT: usize = 4096;
/// Places that are asked whether they are in the page cache.
const SAMPLES: u64 = 32;

/// A source that is read in large pieces by several threads.
pub struct Reading<'a> {
    source: &'a dyn ReadAt,
    extents: Vec<(u64, u64)>,
    /// The file past the page cache, if that is the better way.
    direct: Option<File>,
}

/// A buffer that direct I/O takes.
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Buffer {
    /// A buffer of `length` bytes.
    pub fn new(length: usize) -> Self {
        let bytes = vec![0u8; length + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        Self { bytes, start, length }
    }

    /// Its first `count` bytes.
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

    /// Stretches of the first `length` bytes of `source` that hold data, in order; all of it where nobody can tell.
    pub fn extents(source: &dyn ReadAt, length: u64) -> Vec<(u64, u64)> {
        source.file().and_then(|file| data(file, length)).unwrap_or_else(|| vec![(0, length)])
    }

    /// Reads `count` bytes from `offset` on; how many came, fewer only at the end of the file. Both should be
    /// multiples of the page size.
    ///
    /// # Errors
    /// The system's.
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

    /// Stretches of the file that hold data, in order; all of it where the file system cannot tell.
    pub fn data(&self) -> &[(u64, u64)] {
        &self.extents
    }
}

/// The same file once more, whatever stands at its path by now.
fn open(file: &File, flags: OFlags) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path).ok()
}

/// Whether most of the file is in the page cache.
fn is_cached(file: &File, extents: &[(u64, u64)]) -> bool {
    // A descriptor of its own, so that not being there fetches one page and not what follows it.
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

/// Reads with direct I/O; `None` if the file system does not do it.
fn read_direct(direct: &File, offset: u64, to: &mut [u8]) -> io::Result<Option<usize>> {
    let mut done = 0;
    while done < to.len() {
        match FileExt::read_at(direct, &mut to[done..], offset + done as u64) {
            Ok(0) => break,
            // Only the end of the file is at an odd place.
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
