//! Positional vectored calls, repeated until all is done, and what their failures mean.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::staging::kind_name;
use crate::TransportError;
use crate::parts::{Part, Remaining};

/// Whether a symbolic link that stands for a file is gone through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Links {
    Follow,
    Refuse,
}

/// Opens a regular file to read it, and nothing else: whoever may write to its directory could have put a pipe, whose
/// open waits for its writer, or a device in its place.
pub(super) fn open_regular(path: &Path, links: Links) -> Result<File, TransportError> {
    // For files O_NONBLOCK means nothing.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY | if links == Links::Refuse { libc::O_NOFOLLOW } else { 0 };
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = opened.map_err(|error| system(path, "open", error))?;
    let kind = file.metadata().map_err(|error| system(path, "fstat", error))?.file_type();
    if !kind.is_file() {
        let what = format!("it is {}; pages are read at offsets, from a file", kind_name(kind));
        return Err(TransportError::NotAFile { file: path.display().to_string(), what });
    }
    Ok(file)
}

/// Writes all parts, one behind the other, from byte `offset` on.
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

/// Fills all parts, one behind the other, from byte `offset` on.
///
/// # Safety
/// The parts must be writable for the kernel: nobody may hold a shared reference to their memory.
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
        // SAFETY: the vectors name the parts that `left` borrows: mapped and, as the caller says, writable.
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

/// What a call moved; none if it was interrupted and is to be tried again.
fn moved_bytes(result: isize) -> io::Result<Option<usize>> {
    if result >= 0 {
        return Ok(Some(result as usize));
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::Interrupted => Ok(None),
        error => Err(error),
    }
}

/// A failure at byte `offset`: a full disk is told from all else.
pub(super) fn failed(path: &Path, call: &'static str, offset: u64, source: io::Error) -> TransportError {
    let file = path.display().to_string();
    match source.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => TransportError::DiskFull { file, offset, source },
        _ => TransportError::System { channel: file, call, source },
    }
}

/// A failure that has no offset.
pub(super) fn system(path: &Path, call: &'static str, source: impl Into<io::Error>) -> TransportError {
    failed(path, call, 0, source.into())
}

/// Tries again what a signal interrupted.
pub(super) fn retry<T>(mut act: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match act() {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}
