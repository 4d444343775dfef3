//! Positional vectored I/O, repeated until all bytes have moved, and the conversion of its errors.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use crate::error::TransportError;
use crate::parts::{Part, Remaining};

/// Whether a symbolic link to a file is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Links {
    Follow,
    Refuse,
}

/// Opens a regular file for reading; with followed links also a block device.
///
/// All other objects are refused, because every user who may write to the directory could put a pipe or a device
/// there. Opening a pipe would wait for its writer. `shown` is the name in errors.
pub(super) fn open_regular(path: &Path, shown: &Path, links: Links) -> Result<File, TransportError> {
    // O_NONBLOCK has no effect on regular files; it keeps the open of a pipe from blocking.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | if links == Links::Refuse { libc::O_NOFOLLOW } else { 0 };
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = opened.map_err(|error| system(shown, "open", error))?;
    let kind = file.metadata().map_err(|error| system(shown, "fstat", error))?.file_type();
    // Block devices are allowed because hypervisors store hibernated guests in logical volumes.
    if !(kind.is_file() || links == Links::Follow && kind.is_block_device()) {
        let what = format!("it is {}, but pages can be read only from a file", kind_name(kind));
        return Err(TransportError::NotAFile { file: shown.display().to_string(), what });
    }
    Ok(file)
}

/// Writes all parts in sequence, starting at byte `offset`.
pub(super) fn write_parts<P: Part>(
    file: &File,
    path: &Path,
    offset: u64,
    parts: &[P],
) -> Result<(), TransportError> {
    let mut left = Remaining::new(parts);
    let mut at = offset;
    while left.bytes() > 0 {
        let mut vectors = left.vectors();
        // SAFETY: the vectors name the parts that `left` borrows, which are mapped; the kernel only reads them.
        let moved = unsafe {
            libc::pwritev(
                file.as_raw_fd(),
                vectors.as_mut_ptr(),
                vectors.count() as libc::c_int,
                at as libc::off_t,
            )
        };
        match moved_bytes(moved).map_err(|error| failed(path, "pwritev", at, error))? {
            Some(0) => return Err(failed(path, "pwritev", at, io::ErrorKind::WriteZero.into())),
            Some(moved) => {
                left.advance(moved);
                at += moved as u64;
            }
            None => {}
        }
    }
    Ok(())
}

/// Fills all parts in sequence from byte `offset`.
///
/// # Safety
/// The kernel must be allowed to write the parts: no shared reference to their memory may exist.
pub(super) unsafe fn read_parts<P: Part>(
    file: &File,
    path: &Path,
    offset: u64,
    parts: &[P],
) -> Result<(), TransportError> {
    let mut left = Remaining::new(parts);
    let mut at = offset;
    while left.bytes() > 0 {
        let mut vectors = left.vectors();
        // SAFETY: the vectors name the parts that `left` borrows. They are mapped, and the caller guarantees that
        // they are writable.
        let moved = unsafe {
            libc::preadv(
                file.as_raw_fd(),
                vectors.as_mut_ptr(),
                vectors.count() as libc::c_int,
                at as libc::off_t,
            )
        };
        match moved_bytes(moved).map_err(|error| failed(path, "preadv", at, error))? {
            Some(0) => {
                return Err(TransportError::FileEnd {
                    file: path.display().to_string(),
                    offset: at,
                    missing: left.bytes(),
                });
            }
            Some(moved) => {
                left.advance(moved);
                at += moved as u64;
            }
            None => {}
        }
    }
    Ok(())
}

/// Number of bytes that a call moved. `None` if a signal interrupted it, so that it must be repeated.
fn moved_bytes(result: isize) -> io::Result<Option<usize>> {
    if result >= 0 {
        return Ok(Some(result as usize));
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::Interrupted => Ok(None),
        error => Err(error),
    }
}

/// Makes the error of a call at byte `offset`. A full disk has its own variant.
pub(super) fn failed(path: &Path, call: &'static str, offset: u64, source: io::Error) -> TransportError {
    let file = path.display().to_string();
    match source.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => TransportError::DiskFull { file, offset, source },
        _ => TransportError::System { channel: file, call, source },
    }
}

/// Makes the error of a call that has no offset.
pub(super) fn system(path: &Path, call: &'static str, source: impl Into<io::Error>) -> TransportError {
    failed(path, call, 0, source.into())
}

/// Repeats a call while signals interrupt it.
pub(super) fn retry<T>(mut act: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match act() {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

pub(super) fn kind_name(kind: std::fs::FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}
