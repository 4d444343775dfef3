//! A disk's file or block device, and the lock on it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::sync::Arc;

use sterna::{Hook, VmError};

use super::sector::SECTOR;
use crate::config::DiskOptions;

/// It, open.
pub(super) struct Image {
    file: File,
    path: String,
    len_bytes: u64,
    is_read_only: bool,
}

impl Image {
    /// Not locked yet. What went wrong, without the path.
    pub(super) fn open(options: &DiskOptions) -> Result<Self, String> {
        let mut open = OpenOptions::new();
        open.read(true).write(!options.is_read_only);
        if options.is_direct {
            open.custom_flags(libc::O_DIRECT);
        }
        let file = open.open(&options.path).map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) if options.is_direct => {
                "its file system has no direct I/O: leave `direct=on` out".to_owned()
            }
            _ => error.to_string(),
        })?;
        let kind = file.metadata().map_err(|error| error.to_string())?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err("it is neither a file nor a block device".to_owned());
        }
        // Of a block device, too.
        let end = io::Seek::seek(&mut &file, io::SeekFrom::End(0)).map_err(|error| error.to_string())?;
        if end < SECTOR || !end.is_multiple_of(SECTOR) {
            return Err(format!("{end} bytes are no whole number of sectors of {SECTOR} bytes"));
        }
        if options.is_direct && !takes_sectors(&file) {
            return Err(format!(
                "with direct I/O it takes no pieces of {SECTOR} bytes: leave `direct=on` out"
            ));
        }
        let path = options.path.display().to_string();
        Ok(Self { file, path, len_bytes: end, is_read_only: options.is_read_only })
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Makes these bytes zero, as a hole where that is possible.
    pub(super) fn make_zero(&self, start: u64, length: u64) -> io::Result<()> {
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let fd = self.file.as_raw_fd();
        // SAFETY: the descriptor is open; the call takes numbers.
        match unsafe { libc::fallocate(fd, hole, start as libc::off_t, length as libc::off_t) } {
            0 => Ok(()),
            _ => self.write_zeros(start, length),
        }
    }

    /// The slow way.
    fn write_zeros(&self, start: u64, length: u64) -> io::Result<()> {
        /// A page of direct I/O, and as many as make a long write.
        #[repr(align(4096))]
        struct Zeros([u8; 64 << 10]);
        static ZEROS: Zeros = Zeros([0; 64 << 10]);
        let end = start + length;
        let mut at = start;
        while at < end {
            let piece = ZEROS.0.len().min((end - at) as usize);
            self.file.write_all_at(&ZEROS.0[..piece], at)?;
            at += piece as u64;
        }
        Ok(())
    }

    /// No other program may write it from now on, or read it if this one writes. Other programs have to ask, as QEMU does.
    pub(super) fn lock(&self) -> io::Result<()> {
        let kind = if self.is_read_only { libc::F_RDLCK } else { libc::F_WRLCK };
        self.set_lock(kind).map_err(|error| match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => {
                io::Error::new(error.kind(), "it is locked: another program uses it, such as another VMM")
            }
            _ => error,
        })
    }

    /// What this host has read of it before may be older than what another host has written.
    fn forget_cache(&self) {
        // SAFETY: the descriptor is open; the call takes numbers. It is advice: a kernel that does not take it reads on.
        unsafe { libc::posix_fadvise(self.file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    }

    /// Everything that was written is on the disk, and other programs may use it.
    fn release(&self) -> io::Result<()> {
        if !self.is_read_only {
            self.file.sync_data()?;
        }
        self.set_lock(libc::F_UNLCK)
    }

    /// On all of it. The lock belongs to the open file: it ends with it.
    fn set_lock(&self, kind: i32) -> io::Result<()> {
        let lock = libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        // SAFETY: the descriptor is open, and the kernel reads one `flock`.
        match unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Whether a sector can be read alone, with direct I/O.
fn takes_sectors(file: &File) -> bool {
    let mut buffer = vec![0; 4096 + SECTOR as usize];
    let from = buffer.as_ptr().align_offset(4096);
    file.read_exact_at(&mut buffer[from..from + SECTOR as usize], 0).is_ok()
}

impl AsFd for Image {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Hands the lock over with the guest: both sides see the disk, and one at a time uses it.
pub(super) struct ImageLock {
    index: usize,
    image: Arc<Image>,
}

impl ImageLock {
    pub(super) fn new(index: usize, image: Arc<Image>) -> Self {
        Self { index, image }
    }

    fn did(&self, result: io::Result<()>) -> Result<(), VmError> {
        result.map_err(|error| VmError::new(self.name(), format!("{}: {error}", self.image.path)))
    }
}

impl Hook for ImageLock {
    fn name(&self) -> String {
        format!("disk {}", self.index)
    }

    fn release(&self) -> Result<(), VmError> {
        self.did(self.image.release())
    }

    fn take_back(&self) -> Result<(), VmError> {
        self.did(self.image.lock())
    }

    fn acquire(&self) -> Result<(), VmError> {
        self.did(self.image.lock())?;
        self.image.forget_cache();
        Ok(())
    }

    fn give_back(&self) {
        if let Err(error) = self.image.release() {
            tracing::error!(disk = self.index, %error, "the disk stays locked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn options(path: &Path) -> DiskOptions {
        DiskOptions::new(path)
    }

    #[test]
    fn image_that_is_in_use_is_refused_until_it_is_handed_over() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let here = Arc::new(Image::open(&options(file.path())).unwrap());
        let there = Arc::new(Image::open(&options(file.path())).unwrap());
        let (source, destination) = (ImageLock::new(0, Arc::clone(&here)), ImageLock::new(0, there));
        here.lock().unwrap();

        let refused = destination.acquire().unwrap_err().to_string();
        assert!(refused.contains("is locked") && refused.contains("disk 0"), "{refused}");

        source.release().unwrap();
        destination.acquire().unwrap();
        assert!(source.take_back().is_err());
        destination.give_back();
        source.take_back().unwrap();
    }

    #[test]
    fn image_is_one_of_whole_sectors() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (length, is_one) in [(0, false), (511, false), (512, true), (1000, false), (4096, true)] {
            file.as_file().set_len(length).unwrap();
            assert_eq!(Image::open(&options(file.path())).is_ok(), is_one, "{length}");
        }
        let directory = tempfile::tempdir().unwrap();
        let mut read_only = options(directory.path());
        read_only.is_read_only = true;
        let why = Image::open(&read_only).map(|_| ()).unwrap_err();
        assert!(why.contains("neither a file"), "{why}");
    }
}
