//! Holes, shared extents and copies inside the kernel, with fallbacks where they are missing.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{FallocateFlags, SeekFrom, copy_file_range, fallocate, seek};
use rustix::io::Errno;

use super::alignment::DIRECT_ALIGN;
use super::system::{failed, retry, system};
use crate::error::TransportError;

/// Makes `range` a hole. If the file system has no holes, writes zeros.
pub(super) fn punch(file: &File, path: &Path, range: Range<u64>) -> Result<(), TransportError> {
    if range.is_empty() {
        return Ok(());
    }
    let length = range.end - range.start;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match retry(|| fallocate(file, flags, range.start, length)) {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => zeros(file, path, range),
        result => result.map_err(|error| failed(path, "fallocate(PUNCH_HOLE)", range.start, error)),
    }
}

fn zeros(file: &File, path: &Path, range: Range<u64>) -> Result<(), TransportError> {
    // Bytes after the end already read as zero.
    let end = range.end.min(file.metadata().map_err(|error| system(path, "fstat", error))?.len());
    let block = [0; 64 * 1024];
    let mut at = range.start;
    while at < end {
        let count = (end - at).min(block.len() as u64) as usize;
        file.write_all_at(&block[..count], at).map_err(|error| failed(path, "pwrite", at, error))?;
        at += count as u64;
    }
    Ok(())
}

/// The first range with data at or after `from`, cut at `end`. `None` if only a hole follows.
///
/// File systems without holes report everything as data.
pub(super) fn next_data(
    file: &File,
    path: &Path,
    from: u64,
    end: u64,
) -> Result<Option<Range<u64>>, TransportError> {
    if from >= end {
        return Ok(None);
    }
    let refuse = |error| failed(path, "lseek", from, error);
    let start = match retry(|| seek(file, SeekFrom::Data(from))) {
        Ok(start) if start >= end => return Ok(None),
        Ok(start) => start,
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(Some(from..end)),
        Err(error) => return Err(refuse(error)),
    };
    match retry(|| seek(file, SeekFrom::Hole(start))) {
        Ok(hole) => Ok(Some(start..hole.clamp(start + 1, end))),
        // Another process truncated the file meanwhile.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(Some(start..end)),
        Err(error) => Err(refuse(error)),
    }
}

/// The kernel's `struct file_clone_range`.
#[repr(C)]
struct CloneRange {
    from_file: i64,
    from: u64,
    length: u64,
    to: u64,
}

/// Request number of the kernel: `_IOW(0x94, 13, struct file_clone_range)`.
const FICLONERANGE: libc::c_ulong = 0x4020_940d;

/// Makes `[to, to + length)` share the extents of `from`'s `[at, at + length)`.
///
/// Returns false if the file system cannot share extents, or not at these offsets.
pub(super) fn reflink(
    file: &File,
    path: &Path,
    to: u64,
    from: &File,
    at: u64,
    length: u64,
) -> Result<bool, TransportError> {
    if length == 0 {
        return Ok(true);
    }
    if [to, at, length].iter().any(|number| number % DIRECT_ALIGN != 0) {
        return Ok(false);
    }
    let range = CloneRange { from_file: from.as_raw_fd().into(), from: at, length, to };
    let done = retry(|| {
        // SAFETY: the request takes a pointer to this structure, which the kernel only reads. Both descriptors are
        // open.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), FICLONERANGE, &raw const range) };
        if result < 0 {
            Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
        } else {
            Ok(())
        }
    });
    match done {
        Ok(()) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(
                libc::EOPNOTSUPP | libc::ENOTTY | libc::EXDEV | libc::EINVAL | libc::EBADF | libc::ENOSYS,
            ) => Ok(false),
            _ => Err(failed(path, "ioctl(FICLONERANGE)", to, error)),
        },
    }
}

/// Copies inside the kernel, which shares extents where it can. Returns the number of copied bytes.
///
/// Ends early, without an error, if `from` ends.
pub(super) fn copy(
    file: &File,
    path: &Path,
    to: u64,
    from: &File,
    at: u64,
    length: u64,
) -> Result<u64, TransportError> {
    let mut done = 0;
    while done < length {
        let (mut source, mut target) = (at + done, to + done);
        let count = usize::try_from(length - done).unwrap_or(usize::MAX).min(1 << 30);
        let copied = retry(|| copy_file_range(from, Some(&mut source), file, Some(&mut target), count));
        match copied {
            Ok(0) => break,
            Ok(count) => done += count as u64,
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EXDEV | libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP)
                ) =>
            {
                return Ok(done + copy_through(file, path, to + done, from, at + done, length - done)?);
            }
            Err(error) => return Err(failed(path, "copy_file_range", to + done, error)),
        }
    }
    Ok(done)
}

fn copy_through(
    file: &File,
    path: &Path,
    to: u64,
    from: &File,
    at: u64,
    length: u64,
) -> Result<u64, TransportError> {
    let mut block = vec![0; 1 << 20];
    let mut done = 0;
    while done < length {
        let want = (length - done).min(block.len() as u64) as usize;
        let count = from
            .read_at(&mut block[..want], at + done)
            .map_err(|error| failed(path, "pread", at + done, error))?;
        if count == 0 {
            break;
        }
        file.write_all_at(&block[..count], to + done)
            .map_err(|error| failed(path, "pwrite", to + done, error))?;
        done += count as u64;
    }
    Ok(done)
}
