//! A file that contains the guest's memory byte for byte, such as the memory file of a Firecracker snapshot.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use sterna_image::{ReadAt, Stamp};

use super::cached_file::{CachedFile, FRAME_BYTES};
use crate::source::{PAGE_BYTES, PageSource, SourceError};

/// Largest number of data ranges that are kept. The rest of a file with more counts as data.
const MOST_RANGES: usize = 1 << 20;

/// A raw memory file. Its holes are zero pages.
pub struct RawMemory {
    name: String,
    file: CachedFile,
    stamp: Stamp,
    bytes: u64,
    /// Start and end of the ranges that have data, sorted.
    data: Vec<(u64, u64)>,
}

impl RawMemory {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// [`SourceError::System`]; [`SourceError::Length`] if the length is no multiple of 4096, or 0.
    pub fn open(path: &Path) -> Result<Self, SourceError> {
        let name = path.display().to_string();
        let system = |call| {
            let name = name.clone();
            move |source| SourceError::System { name, offset: 0, call, source }
        };
        let file = File::open(path).map_err(system("open"))?;
        let stamp = file.stamp().map_err(system("fstat"))?;
        let bytes = file.len_bytes().map_err(system("fstat"))?;
        if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
            return Err(SourceError::Length { name, bytes });
        }
        let data = data_ranges(&file, bytes).map_err(system("lseek"))?;
        Ok(Self { file: CachedFile::new(file), name, stamp, bytes, data })
    }

    /// Checks after a read that the bytes are those of the file as it was opened.
    fn check(&self, offset: u64) -> Result<(), SourceError> {
        let stamp = self.file.file().stamp().map_err(|source| self.failed(offset, "fstat", source))?;
        let name = || self.name.clone();
        if stamp == self.stamp { Ok(()) } else { Err(SourceError::Changed { name: name() }) }
    }

    fn failed(&self, offset: u64, call: &'static str, source: io::Error) -> SourceError {
        let name = self.name.clone();
        if source.kind() == io::ErrorKind::UnexpectedEof {
            return SourceError::Short { name, offset };
        }
        SourceError::System { name, offset, call, source }
    }
}

impl PageSource for RawMemory {
    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> u64 {
        self.bytes
    }

    fn frame_bytes(&self) -> u64 {
        FRAME_BYTES
    }

    fn is_zero(&self, offset: u64, bytes: u64) -> bool {
        let next = self.data.partition_point(|(_, end)| *end <= offset);
        self.data.get(next).is_none_or(|(start, _)| *start >= offset + bytes)
    }

    fn read_now(&self, offset: u64, to: &mut [u8]) -> Result<bool, SourceError> {
        let is_read =
            self.file.read_now(offset, to).map_err(|source| self.failed(offset, "pread", source))?;
        if is_read {
            self.check(offset)?;
        }
        Ok(is_read)
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), SourceError> {
        self.file.read(offset, to).map_err(|source| self.failed(offset, "pread", source))?;
        self.check(offset)
    }
}

/// The ranges of the file that have data, widened to whole pages.
fn data_ranges(file: &File, bytes: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    let mut at = 0;
    while at < bytes {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            // The file system knows no holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                ranges.push((at, bytes));
                break;
            }
            Err(error) => return Err(error.into()),
        };
        if ranges.len() == MOST_RANGES {
            ranges.push((start, bytes));
            break;
        }
        at = seek(file, SeekFrom::Hole(start))?.max(start + 1);
        let (start, end) = (start & !(PAGE_BYTES - 1), at.next_multiple_of(PAGE_BYTES));
        match ranges.last_mut() {
            Some(last) if last.1 >= start => last.1 = end,
            _ => ranges.push((start, end)),
        }
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn sparse(bytes: u64, data: &[u64]) -> (tempfile::NamedTempFile, RawMemory) {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(bytes).unwrap();
        for offset in data {
            file.as_file().write_all_at(&[7; 100], *offset).unwrap();
        }
        let memory = RawMemory::open(file.path()).unwrap();
        (file, memory)
    }

    #[test]
    fn holes_are_zero_and_data_is_read() {
        let (_file, memory) = sparse(1 << 20, &[0x40000]);

        assert!(memory.is_zero(0, 0x40000));
        assert!(!memory.is_zero(0x40000, 4096));
        assert!(memory.is_zero(0x80000, 0x80000));
        let mut page = [1; 4096];
        memory.read(0x40000, &mut page).unwrap();
        assert_eq!((page[99], page[100]), (7, 0));
    }

    #[test]
    fn file_that_changes_is_not_read_any_more() {
        let (file, memory) = sparse(8192, &[0]);
        file.as_file().set_len(4096).unwrap();

        let mut page = [0; 4096];
        assert!(matches!(memory.read(4096, &mut page), Err(SourceError::Short { offset: 4096, .. })));
        assert!(matches!(memory.read(0, &mut page), Err(SourceError::Changed { .. })));
        assert!(!matches!(memory.read_now(0, &mut page), Ok(true)));
    }

    #[test]
    fn length_that_no_memory_has_is_refused() {
        for bytes in [0, 4097] {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(bytes).unwrap();

            let refused = RawMemory::open(file.path()).err();
            assert!(matches!(refused, Some(SourceError::Length { bytes: found, .. }) if found == bytes));
        }
    }
}
