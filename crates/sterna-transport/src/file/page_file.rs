//! A file for pages.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use sterna_ram::RamSlice;

use super::staging::{self, StagingFile, stale_staging_files};
use super::system::{Links, open_regular, read_parts, system, write_parts};
use super::{DIRECT_ALIGN, sparse};
use crate::parts::Part;
use crate::{IoPart, TransportError};

/// Whether whole pages go past the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Direct {
    /// They do not.
    #[default]
    Off,
    /// They do where the file system can; [`PageFile::is_direct`] tells.
    Wanted,
    /// They do, or the file is refused ([`TransportError::NoDirect`]).
    Required,
}

/// How to make a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CreateOptions {
    /// Past the page cache.
    pub direct: Direct,
    /// A file that lies in the place is replaced; else it is refused ([`TransportError::FileExists`]).
    pub replace: bool,
    /// The new file begins with so many bytes of the one that is replaced (a container's header).
    pub keep_bytes: u64,
}

/// How to open a file to read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpenOptions {
    /// Past the page cache.
    pub direct: Direct,
}

/// A file that pages go into or come from; see the module's documentation. Shared by threads.
#[derive(Debug)]
pub struct PageFile {
    /// Through the page cache.
    file: File,
    /// The same file, past it.
    direct: Option<File>,
    path: PathBuf,
    /// None once it is in its place, or if it was opened to be read.
    staging: Mutex<Option<StagingFile>>,
}

impl PageFile {
    /// Begins a new file for `path`, as a staging file.
    ///
    /// # Errors
    /// [`TransportError::FileExists`], [`TransportError::NotAFile`], [`TransportError::NoDirect`],
    /// [`TransportError::DiskFull`], [`TransportError::System`]. Nothing is left behind.
    pub fn create(path: impl AsRef<Path>, options: CreateOptions) -> Result<PageFile, TransportError> {
        let (staging, file) = StagingFile::create(path.as_ref(), options.replace)?;
        let direct = open_direct(&file, staging.path(), options.direct, true)?;
        let path = staging.place().to_owned();
        if options.keep_bytes > 0 {
            match open_regular(&path, Links::Follow) {
                Ok(old) => sparse::copy(&file, &path, 0, &old, 0, options.keep_bytes).map(drop)?,
                Err(TransportError::System { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(PageFile { file, direct, path, staging: Mutex::new(Some(staging)) })
    }

    /// A file without a name in `directory`, which is gone when the last descriptor is closed, whatever happens.
    /// [`PageFile::path`] only describes it.
    ///
    /// # Errors
    /// [`TransportError::NoDirect`], [`TransportError::DiskFull`], [`TransportError::System`].
    pub fn temporary(directory: impl AsRef<Path>, direct: Direct) -> Result<PageFile, TransportError> {
        let file = staging::temporary(directory.as_ref())?;
        let path = PathBuf::from(format!("a temporary file in {}", directory.as_ref().display()));
        let direct = open_direct(&file, &path, direct, true)?;
        Ok(PageFile { file, direct, path, staging: Mutex::new(None) })
    }

    /// Opens a complete file to read it.
    ///
    /// # Errors
    /// [`TransportError::NotAFile`], [`TransportError::NoDirect`], [`TransportError::System`].
    pub fn open(path: impl AsRef<Path>, options: OpenOptions) -> Result<PageFile, TransportError> {
        let path = path.as_ref().to_owned();
        let file = open_regular(&path, Links::Follow)?;
        let direct = open_direct(&file, &path, options.direct, false)?;
        Ok(PageFile { file, direct, path, staging: Mutex::new(None) })
    }

    /// Staging files for `path` that another run left when it was killed.
    pub fn stale_staging_files(path: impl AsRef<Path>) -> Vec<PathBuf> {
        stale_staging_files(path.as_ref())
    }

    /// Removes the staging files of this process that are not to be [kept](PageFile::keep): for a process that is about
    /// to end without dropping anything, such as one that was told to by a signal. Files that are being made can
    /// not be published afterwards.
    pub fn remove_staging_files() {
        staging::remove_all();
    }

    /// The file once more, through the page cache and wherever it lies: one that outlives this.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn reopened(&self) -> Result<File, TransportError> {
        self.file.try_clone().map_err(|error| system(&self.path, "dup", error))
    }

    /// Its place.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where it lies until it is complete; none then. Another program may write it there, if it keeps the file
    /// (opens it without replacing it).
    pub fn staging_path(&self) -> Option<PathBuf> {
        self.staging.lock().as_ref().map(|staging| staging.path().to_owned())
    }

    /// Whether whole pages go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Its length in bytes.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn len_bytes(&self) -> Result<u64, TransportError> {
        Ok(self.metadata()?.len())
    }

    /// Bytes of the disk that it takes.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn allocated_bytes(&self) -> Result<u64, TransportError> {
        Ok(self.metadata()?.blocks() * 512)
    }

    /// When it was changed last, in a form that only equality is asked of: device, inode, length, the time of its
    /// bytes, and the time of its inode, which nobody can set back. Reading changes neither; a new name, owner or mode
    /// changes the latter.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn version(&self) -> Result<[i64; 7], TransportError> {
        let now = self.metadata()?;
        let (device, inode, length) = (now.dev() as i64, now.ino() as i64, now.len() as i64);
        Ok([device, inode, length, now.mtime(), now.mtime_nsec(), now.ctime(), now.ctime_nsec()])
    }

    /// Makes it `length` bytes long; what is new reads as zero.
    ///
    /// # Errors
    /// [`TransportError::DiskFull`], [`TransportError::System`].
    pub fn set_len(&self, length: u64) -> Result<(), TransportError> {
        self.file.set_len(length).map_err(|error| system(&self.path, "ftruncate", error))
    }

    /// Writes all parts, one behind the other, from byte `offset` on, at any alignment. Returns when the kernel
    /// has them. What is aligned in the file and in memory goes directly, the rest through the page cache.
    ///
    /// # Errors
    /// [`TransportError::DiskFull`], [`TransportError::System`].
    pub fn write_at(&self, offset: u64, parts: &[IoPart<'_>]) -> Result<(), TransportError> {
        write_parts(self.file_for(offset, parts), &self.path, offset, parts)
    }

    /// Fills windows of guest RAM from byte `offset` on, at any alignment.
    ///
    /// # Errors
    /// [`TransportError::FileEnd`], [`TransportError::System`].
    pub fn read_at(&self, offset: u64, parts: &[RamSlice<'_>]) -> Result<(), TransportError> {
        // SAFETY: windows of guest RAM are writable, and no reference to guest RAM ever exists.
        unsafe { read_parts(self.file_for(offset, parts), &self.path, offset, parts) }
    }

    /// Fills `buffer` from byte `offset` on, at any alignment.
    ///
    /// # Errors
    /// [`TransportError::FileEnd`], [`TransportError::System`].
    pub fn read_bytes_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), TransportError> {
        let part = [Whole(buffer.as_mut_ptr(), buffer.len())];
        // SAFETY: the part is a unique borrow of ours.
        unsafe { read_parts(self.file_for(offset, &part), &self.path, offset, &part) }
    }

    /// Makes a range a hole: it reads as zero and takes no room.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn punch(&self, range: Range<u64>) -> Result<(), TransportError> {
        sparse::punch(&self.file, &self.path, range)
    }

    /// The first range that holds data at or behind `from`, cut at `end`; none if only a hole is left.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn next_data(&self, from: u64, end: u64) -> Result<Option<Range<u64>>, TransportError> {
        sparse::next_data(&self.file, &self.path, from, end)
    }

    /// Lets `[to, to + length)` share the disk blocks of `from`'s bytes from `at` on. False, and nothing was
    /// done, where the file system does not share, or the offsets are not multiples of its blocks.
    ///
    /// # Errors
    /// [`TransportError::DiskFull`], [`TransportError::System`].
    pub fn reflink_range(
        &self,
        to: u64,
        from: &PageFile,
        at: u64,
        length: u64,
    ) -> Result<bool, TransportError> {
        sparse::reflink(&self.file, &self.path, to, &from.file, at, length)
    }

    /// Copies `length` bytes of `from` inside the kernel, shared where that can be. Gives the bytes copied:
    /// fewer where `from` ends. Holes are copied as zeros: ask [`PageFile::next_data`] first.
    ///
    /// # Errors
    /// [`TransportError::DiskFull`], [`TransportError::System`].
    pub fn copy_range(&self, to: u64, from: &PageFile, at: u64, length: u64) -> Result<u64, TransportError> {
        sparse::copy(&self.file, &self.path, to, &from.file, at, length)
    }

    /// Puts what was written so far on the disk.
    ///
    /// # Errors
    /// [`TransportError::DiskFull`] (file systems that allocate late), [`TransportError::System`].
    pub fn sync(&self) -> Result<(), TransportError> {
        self.file.sync_all().map_err(|error| system(&self.path, "fsync", error))
    }

    /// Puts it on the disk and into its place. Nobody may write it any more.
    ///
    /// # Errors
    /// [`TransportError::FileExists`] if something came into the place meanwhile; [`TransportError::DiskFull`],
    /// [`TransportError::System`]. The place is as it was.
    pub fn complete(&self) -> Result<(), TransportError> {
        self.sync()?;
        self.publish()
    }

    /// Moves it into its place: the second half of [`PageFile::complete`], for those who have called
    /// [`PageFile::sync`].
    ///
    /// # Errors
    /// As [`PageFile::complete`], also if only the directory could not be put on the disk: the file is a staging file
    /// again and may be published once more, or [kept](PageFile::keep). Only where a file system knows neither
    /// `RENAME_EXCHANGE` nor links, a file that was replaced then is gone, and this one stays in its place.
    pub fn publish(&self) -> Result<(), TransportError> {
        let mut staging = self.staging.lock();
        let Some(staging_now) = &mut *staging else { return Ok(()) };
        let published = staging_now.publish(&self.file);
        if staging_now.is_published() {
            *staging = None;
        }
        published
    }

    /// The file stays where it lies, also if it never comes into its place: it may be the only copy of what is
    /// in it. Gives its path: the staging file's, or the place if it is there. Whoever asks for it must have called
    /// [`PageFile::sync`], and should tell its user where the file is. It can still be published.
    pub fn keep(&self) -> PathBuf {
        match &mut *self.staging.lock() {
            Some(staging) => {
                staging.keep();
                staging.path().to_owned()
            }
            None => self.path.clone(),
        }
    }

    /// The descriptor that goes past the page cache, if there is one, else the other.
    pub(super) fn fast(&self) -> BorrowedFd<'_> {
        self.direct.as_ref().unwrap_or(&self.file).as_fd()
    }

    /// The descriptor that fits these parts.
    fn file_for<P: Part>(&self, offset: u64, parts: &[P]) -> &File {
        let fits = |part: &P| {
            let (start, length) = part.raw();
            (start as u64 | length as u64).is_multiple_of(DIRECT_ALIGN)
        };
        match &self.direct {
            Some(direct) if offset.is_multiple_of(DIRECT_ALIGN) && parts.iter().all(fits) => direct,
            _ => &self.file,
        }
    }

    /// Writes what is aligned, past the page cache where that can be.
    pub(super) fn write_fast<P: Part>(&self, offset: u64, parts: &[P]) -> Result<(), TransportError> {
        write_parts(self.direct.as_ref().unwrap_or(&self.file), &self.path, offset, parts)
    }

    /// Reads what is aligned, past the page cache where that can be.
    ///
    /// # Safety
    /// As `read_parts`.
    pub(super) unsafe fn read_fast<P: Part>(&self, offset: u64, parts: &[P]) -> Result<(), TransportError> {
        // SAFETY: the caller vouches for the parts.
        unsafe { read_parts(self.direct.as_ref().unwrap_or(&self.file), &self.path, offset, parts) }
    }

    /// Writes through the page cache, whatever the alignment.
    pub(super) fn write_cached<P: Part>(&self, offset: u64, parts: &[P]) -> Result<(), TransportError> {
        write_parts(&self.file, &self.path, offset, parts)
    }

    /// Reads through the page cache, whatever the alignment.
    ///
    /// # Safety
    /// As `read_parts`.
    pub(super) unsafe fn read_cached<P: Part>(&self, offset: u64, parts: &[P]) -> Result<(), TransportError> {
        // SAFETY: the caller vouches for the parts.
        unsafe { read_parts(&self.file, &self.path, offset, parts) }
    }

    fn metadata(&self) -> Result<std::fs::Metadata, TransportError> {
        self.file.metadata().map_err(|error| system(&self.path, "fstat", error))
    }
}

/// Memory for a call.
pub(super) struct Whole(pub *mut u8, pub usize);

impl Part for Whole {
    fn raw(&self) -> (*mut u8, usize) {
        (self.0, self.1)
    }
}

/// Opens the file again, past the page cache.
fn open_direct(
    file: &File,
    path: &Path,
    wanted: Direct,
    write: bool,
) -> Result<Option<File>, TransportError> {
    if wanted == Direct::Off {
        return Ok(None);
    }
    let why = match check_alignment(file) {
        Ok(()) => {
            // By the descriptor, not by the name, which might be another's by now.
            let name = format!("/proc/self/fd/{}", file.as_raw_fd());
            let opened =
                std::fs::OpenOptions::new().read(true).write(write).custom_flags(libc::O_DIRECT).open(name);
            match opened {
                Ok(direct) => return Ok(Some(direct)),
                Err(error) => error.to_string(),
            }
        }
        Err(why) => why,
    };
    if wanted == Direct::Required {
        return Err(TransportError::NoDirect { file: path.display().to_string(), why });
    }
    Ok(None)
}

/// What `statx` says of direct I/O on this file.
fn check_alignment(file: &File) -> Result<(), String> {
    let mut status = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: an empty path with AT_EMPTY_PATH means the descriptor; the kernel fills a structure of this type.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            status.as_mut_ptr(),
        )
    };
    // SAFETY: all zero is a valid value of this structure of integers, filled or not.
    let status = unsafe { status.assume_init() };
    if result != 0 || status.stx_mask & libc::STATX_DIOALIGN == 0 {
        // An old kernel, or a file system that does not say: opening tells.
        return Ok(());
    }
    match status.stx_dio_mem_align.max(status.stx_dio_offset_align) {
        0 => Err("the file system has no direct I/O".to_owned()),
        align if u64::from(align) <= DIRECT_ALIGN => Ok(()),
        align => {
            Err(format!("the file system wants direct I/O in units of {align} bytes, not {DIRECT_ALIGN}"))
        }
    }
}
