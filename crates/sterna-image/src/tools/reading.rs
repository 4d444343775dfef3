//! Reading much of a file once: from the page cache what is there, the rest past it.
//!
//! An image is read once, so filling the page cache with it costs more than the disk does. But what is there
//! already comes from memory several times as fast. Each piece is asked from the cache first (`RWF_NOWAIT` gives
//! what is there and does not wait), and only otherwise read with direct I/O. Where the file system has neither,
//! plain reads do.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{OFlags, SeekFrom};
use rustix::io::{Errno, IoSliceMut, ReadWriteFlags};

use crate::read::ReadAt;

/// What direct I/O wants offsets, lengths and buffers to be multiples of.
const ALIGNMENT: usize = 4096;

/// A source that is read in large pieces by several threads.
pub struct Reading<'a> {
    source: &'a dyn ReadAt,
    direct: Option<File>,
    asks_cache: AtomicBool,
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
    /// Prepares to read `source`.
    pub fn new(source: &'a dyn ReadAt) -> Self {
        let direct = source.file().and_then(|file| {
            // The same file, whatever stands at its path by now.
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path).ok()
        });
        Self { source, direct, asks_cache: AtomicBool::new(true) }
    }

    /// Reads `count` bytes from `offset` on; how many came, fewer only at the end of the file. Both should be
    /// multiples of the page size.
    ///
    /// # Errors
    /// The system's.
    pub fn read(&self, offset: u64, count: usize, buffer: &mut Buffer) -> io::Result<usize> {
        let to = buffer.first_mut(count);
        if let (Some(direct), Some(file)) = (&self.direct, self.source.file()) {
            if self.asks_cache.load(Ordering::Relaxed) {
                match rustix::io::preadv2(file, &mut [IoSliceMut::new(to)], offset, ReadWriteFlags::NOWAIT) {
                    Ok(got) if got == to.len() => return Ok(got),
                    Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS) => {
                        self.asks_cache.store(false, Ordering::Relaxed);
                    }
                    _ => {}
                }
            }
            if let Some(got) = read_direct(direct, offset, to)? {
                return Ok(got);
            }
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
    pub fn data(&self, length: u64) -> Vec<(u64, u64)> {
        match self.source.file() {
            Some(file) => data(file, length).unwrap_or_else(|| vec![(0, length)]),
            None => vec![(0, length)],
        }
    }
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
        let reading = Reading::new(&file);
        let mut buffer = Buffer::new(1 << 20);

        let got = reading.read(1 << 20, 1 << 20, &mut buffer).unwrap();
        let end = reading.read((3 << 20) - 4096, 1 << 20, &mut Buffer::new(1 << 20)).unwrap();

        assert_eq!((got, end), (1 << 20, 4096));
        assert!(buffer.first(5000).iter().all(|byte| *byte == 7) && buffer.first(5001)[5000] == 0);
        let data = reading.data(3 << 20);
        assert!(data.iter().any(|(start, end)| *start <= 1 << 20 && *end >= (1 << 20) + 5000), "{data:?}");
    }
}
