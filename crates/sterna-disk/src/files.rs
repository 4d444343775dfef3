//! Opens the files of a disk, and locks them with `fcntl`.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use crate::options::ImageOptions;

/// Opens a file of a disk. The error text does not contain the path.
pub(crate) fn open_file(path: &Path, options: &ImageOptions, is_written: bool) -> Result<File, String> {
    let mut open = OpenOptions::new();
    open.read(true).write(is_written);
    if options.is_direct {
        open.custom_flags(libc::O_DIRECT);
    }
    let file = open.open(path).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) if options.is_direct => {
            "its file system does not support direct I/O: leave `direct=on` out".to_owned()
        }
        _ => error.to_string(),
    })?;
    let kind = file.metadata().map_err(|error| error.to_string())?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err("it is neither a file nor a block device".to_owned());
    }
    Ok(file)
}

/// Locks or unlocks the whole file.
///
/// The lock belongs to the open file description: closing the last descriptor releases it.
pub(crate) fn set_lock(file: &File, kind: i32) -> io::Result<()> {
    let lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the kernel reads one `flock`.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => {
            io::Error::new(error.kind(), "it is locked: another program uses it, such as another VMM")
        }
        _ => error,
    })
}
