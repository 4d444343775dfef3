//! A file of pages, with staging, direct I/O and holes.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use sterna_ram::RamSlice;

use super::aborted;
use super::alignment::DIRECT_ALIGN;
use super::sparse;
use super::staging::{self, StagingFile, stale_staging_files};
use super::system::{Links, open_regular, read_parts, system, write_parts};
use crate::error::TransportError;
use crate::parts::IoPart;
use crate::parts::Part;

/// Whether whole pages bypass the page cache (direct I/O).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Direct {
    /// All bytes go through the page cache.
    #[default]
    Off,
    /// Direct I/O if the file system supports it; [`PageFile::is_direct`] reports the result.
    Wanted,
    /// Direct I/O, or the file is refused ([`TransportError::NoDirect`]).
    Required,
}

/// Settings for creating a file with [`PageFile::create`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CreateOptions {
    /// Whether whole pages bypass the page cache.
    pub direct: Direct,
    /// Whether an existing file is replaced. If false, an existing file is an error ([`TransportError::FileExists`]).
    pub replace: bool,
    /// Number of bytes that are copied from the start of the replaced file (a container's header).
    pub keep_bytes: u64,
}

/// Settings for opening a file with [`PageFile::open`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpenOptions {
    /// Whether whole pages bypass the page cache.
    pub direct: Direct,
}

/// A file that pages are written to or read from; see the module's documentation. Threads can share it.
#[derive(Debug)]
pub struct PageFile {
    /// Descriptor that uses the page cache.
    file: File,
    /// Descriptor of the same file that bypasses the page cache.
    direct: Option<File>,
    path: PathBuf,
    /// `None` after publishing, and if the file was opened for reading.
    staging: Mutex<Option<StagingFile>>,
}

impl PageFile {
    /// Creates a new file for `path`, as a staging file.
    ///
    /// # Errors
    /// [`TransportError::FileExists`], [`TransportError::NotAFile`], [`TransportError::NoDirect`],
    /// [`TransportError::DiskFull`], [`TransportError::System`]. No staging file remains.
    pub fn create(path: impl AsRef<Path>, options: CreateOptions) -> Result<PageFile, TransportError> {
        let (staging, file) = StagingFile::create(path.as_ref(), options.replace)?;
        let direct = open_direct(&file, staging.path(), options.direct, true)?;
        let path = staging.place().to_owned();
        if options.keep_bytes > 0 {
            match open_regular(&path, &path, Links::Follow) {
                Ok(old) => sparse::copy(&file, &path, 0, &old, 0, options.keep_bytes).map(drop)?,
                Err(TransportError::System { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(PageFile { file, direct, path, staging: Mutex::new(Some(staging)) })
    }

    /// Creates a file without a name in `directory`. The kernel removes it when its last descriptor is closed.
    ///
    /// [`PageFile::path`] is then only a description.
    ///
    /// # Errors
    /// [`TransportError::NoDirect`], [`TransportError::DiskFull`], [`TransportError::System`].
    pub fn temporary(directory: impl AsRef<Path>, direct: Direct) -> Result<PageFile, TransportError> {
        let file = staging::temporary(directory.as_ref())?;
        let path = PathBuf::from(format!("a temporary file in {}", directory.as_ref().display()));
        let direct = open_direct(&file, &path, direct, true)?;
        Ok(PageFile { file, direct, path, staging: Mutex::new(None) })
    }

    /// Opens a complete file for reading.
    ///
    /// # Errors
    /// [`TransportError::NotAFile`], [`TransportError::NoDirect`], [`TransportError::System`].
    pub fn open(path: impl AsRef<Path>, options: OpenOptions) -> Result<PageFile, TransportError> {
        let path = path.as_ref().to_owned();
        let file = open_regular(&path, &path, Links::Follow)?;
        let direct = open_direct(&file, &path, options.direct, false)?;
        Ok(PageFile { file, direct, path, staging: Mutex::new(None) })
    }

    /// Opens the same file as `file` again, even if its path now names another. `path` is its name in errors.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_again(
        file: &File,
        path: impl AsRef<Path>,
        options: OpenOptions,
    ) -> Result<PageFile, TransportError> {
        let path = path.as_ref().to_owned();
        let name = format!("/proc/self/fd/{}", file.as_raw_fd());
        let file = open_regular(Path::new(&name), &path, Links::Follow)?;
        let direct = open_direct(&file, &path, options.direct, false)?;
        Ok(PageFile { file, direct, path, staging: Mutex::new(None) })
    }

    /// Finds staging files for `path` that no process writes any more. `kill -9` can leave one.
    pub fn stale_staging_files(path: impl AsRef<Path>) -> Vec<PathBuf> {
        stale_staging_files(path.as_ref())
    }

    /// Removes the staging files of this process that are not to be [kept](PageFile::keep).
    ///
    /// It is for a process that ends without dropping its values, for example after a signal. Files that are being
    /// written cannot be published afterwards.
    pub fn remove_staging_files() {
        staging::remove_all();
    }

    /// Makes an abort of this process remove its staging files, as [`PageFile::remove_staging_files`] does.
    ///
    /// The process then ends with exit status 1 and `message` on standard error instead of by a signal. A Rust
    /// program aborts when a memory allocation fails.
    pub fn remove_staging_files_on_abort(message: &'static str) {
        aborted::clean_up(message);
    }

    /// A second descriptor of the file, through the page cache, which outlives this value.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn reopened(&self) -> Result<File, TransportError> {
        self.file.try_clone().map_err(|error| system(&self.path, "dup", error))
    }

    /// The path at which the file will be, or is, published.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of the staging file; `None` after publishing.
    ///
    /// Another program may write the file there, if it opens the file without replacing it.
    pub fn staging_path(&self) -> Option<PathBuf> {
        self.staging.lock().as_ref().map(|staging| staging.path().to_owned())
    }

    /// Whether whole pages bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Length of the file or block device in bytes.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn len_bytes(&self) -> Result<u64, TransportError> {
        let metadata = self.metadata()?;
        if metadata.file_type().is_block_device() {
            // The inode of a device has no length. Moving the position is harmless, because all I/O here has
            // explicit offsets.
            return (&self.file).seek(SeekFrom::End(0)).map_err(|error| system(&self.path, "lseek", error));
        }
        Ok(metadata.len())
    }

    /// Bytes that the file occupies on the disk.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn allocated_bytes(&self) -> Result<u64, TransportError> {
        Ok(self.metadata()?.blocks() * 512)
    }

    /// An identification of the file's content, to be compared for equality only.
    ///
    /// It consists of device, inode, length, modification time and change time. No program can set the change time
    /// back. Reading changes neither time; a new name, owner or mode changes the change time.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn version(&self) -> Result<[i64; 7], TransportError> {
        let now = self.metadata()?;
        let (device, inode, length) = (now.dev() as i64, now.ino() as i64, now.len() as i64);
        Ok([device, inode, length, now.mtime(), now.mtime_nsec(), now.ctime(), now.ctime_nsec()])
    }

    /// Sets the length in bytes. New bytes read as zero.
    ///
    /// # Errors
    /// [`TransportError::DiskFull`], [`TransportError::System`].
    pub fn set_len(&self, length: u64) -> Result<(), TransportError> {
        self.file.set_len(length).map_err(|error| system(&self.path, "ftruncate", error))
    }

    /// Writes all parts in sequence, starting at byte `offset`, at any alignment.
    ///
    /// Returns when the kernel has accepted the bytes. Parts that are aligned in the file and in memory bypass the
    /// page cache; others go through it.
    ///
    /// # Errors
    /// [`TransportError::DiskFull`], [`TransportError::System`].
    pub fn write_at(&self, offset: u64, parts: &[IoPart<'_>]) -> Result<(), TransportError> {
        write_parts(self.file_for(offset, parts), &self.path, offset, parts)
    }

    /// Fills windows of guest RAM with the bytes from `offset`, at any alignment.
    ///
    /// # Errors
    /// [`TransportError::FileEnd`], [`TransportError::System`].
    pub fn read_at(&self, offset: u64, parts: &[RamSlice<'_>]) -> Result<(), TransportError> {
        // SAFETY: windows of guest RAM are writable, and no reference to guest RAM ever exists.
        unsafe { read_parts(self.file_for(offset, parts), &self.path, offset, parts) }
    }

    /// Fills `buffer` with the bytes from `offset`, at any alignment.
    ///
    /// # Errors
    /// [`TransportError::FileEnd`], [`TransportError::System`].
    pub fn read_bytes_at(&self, offset: u64, buffer: &mut [u8]) -> Result<(), TransportError> {
        let part = [Whole(buffer.as_mut_ptr(), buffer.len())];
        // SAFETY: the part is this function's unique borrow of the buffer.
        unsafe { read_parts(self.file_for(offset, &part), &self.path, offset, &part) }
    }

    /// Makes a range a hole: it reads as zero and occupies no disk space.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn punch(&self, range: Range<u64>) -> Result<(), TransportError> {
        sparse::punch(&self.file, &self.path, range)
    }

    /// The first range with data at or after `from`, cut at `end`. `None` if only a hole follows.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn next_data(&self, from: u64, end: u64) -> Result<Option<Range<u64>>, TransportError> {
        sparse::next_data(&self.file, &self.path, from, end)
    }

    /// Makes `[to, to + length)` share the disk blocks of `from` that start at `at`.
    ///
    /// Returns false, without any change, if the file system cannot share blocks or the offsets are not multiples
    /// of its blocks.
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

    /// Copies `length` bytes of `from` inside the kernel, with shared blocks where possible.
    ///
    /// Returns the number of copied bytes, which is smaller if `from` ends. Holes are copied as zeros: call
    /// [`PageFile::next_data`] first to skip them.
    ///
    /// # Errors
    /// [`TransportError::DiskFull`], [`TransportError::System`].
    pub fn copy_range(&self, to: u64, from: &PageFile, at: u64, length: u64) -> Result<u64, TransportError> {
        sparse::copy(&self.file, &self.path, to, &from.file, at, length)
    }

    /// Flushes all written bytes to the disk.
    ///
    /// # Errors
    /// [`TransportError::DiskFull`] (file systems that allocate late), [`TransportError::System`].
    pub fn sync(&self) -> Result<(), TransportError> {
        self.file.sync_all().map_err(|error| system(&self.path, "fsync", error))
    }

    /// Flushes the file to the disk and renames it to its place. Nothing may write it afterwards.
    ///
    /// # Errors
    /// [`TransportError::FileExists`] if another file was created at the place meanwhile;
    /// [`TransportError::DiskFull`], [`TransportError::System`]. The place keeps its previous content.
    pub fn complete(&self) -> Result<(), TransportError> {
        self.sync()?;
        self.publish()
    }

    /// Renames the file to its place: the second half of [`PageFile::complete`], after [`PageFile::sync`].
    ///
    /// # Errors
    /// As [`PageFile::complete`], also if only the sync of the directory failed. The file is then a staging file
    /// again, and can be published again or [kept](PageFile::keep). Exception: if the file system has neither
    /// `RENAME_EXCHANGE` nor links, a replaced file is lost and the new one stays in its place.
    pub fn publish(&self) -> Result<(), TransportError> {
        let mut staging = self.staging.lock();
        let Some(staging_now) = &mut *staging else { return Ok(()) };
        let published = staging_now.publish(&self.file);
        if staging_now.is_published() {
            *staging = None;
        }
        published
    }

    /// Keeps the staging file even if it is never published. It may be the only copy of its content.
    ///
    /// Returns its path: the staging file's, or the place after publishing. The caller must have called
    /// [`PageFile::sync`], and should show the path to its user. The file can still be published.
    pub fn keep(&self) -> PathBuf {
        match &mut *self.staging.lock() {
            Some(staging) => {
                staging.keep();
                staging.path().to_owned()
            }
            None => self.path.clone(),
        }
    }

    /// The descriptor for direct I/O if there is one, otherwise the other.
    pub(super) fn fast(&self) -> BorrowedFd<'_> {
        self.direct.as_ref().unwrap_or(&self.file).as_fd()
    }

    /// The descriptor for these parts: direct I/O only if all of them are aligned.
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

    /// Writes aligned parts, bypassing the page cache if the file allows it.
    pub(super) fn write_fast<P: Part>(&self, offset: u64, parts: &[P]) -> Result<(), TransportError> {
        write_parts(self.direct.as_ref().unwrap_or(&self.file), &self.path, offset, parts)
    }

    /// Reads aligned parts, bypassing the page cache if the file allows it.
    ///
    /// # Safety
    /// As `read_parts`.
    pub(super) unsafe fn read_fast<P: Part>(&self, offset: u64, parts: &[P]) -> Result<(), TransportError> {
        // SAFETY: the caller guarantees that the parts are writable.
        unsafe { read_parts(self.direct.as_ref().unwrap_or(&self.file), &self.path, offset, parts) }
    }

    /// Writes through the page cache, at any alignment.
    pub(super) fn write_cached<P: Part>(&self, offset: u64, parts: &[P]) -> Result<(), TransportError> {
        write_parts(&self.file, &self.path, offset, parts)
    }

    /// Reads through the page cache, at any alignment.
    ///
    /// # Safety
    /// As `read_parts`.
    pub(super) unsafe fn read_cached<P: Part>(&self, offset: u64, parts: &[P]) -> Result<(), TransportError> {
        // SAFETY: the caller guarantees that the parts are writable.
        unsafe { read_parts(&self.file, &self.path, offset, parts) }
    }

    fn metadata(&self) -> Result<std::fs::Metadata, TransportError> {
        self.file.metadata().map_err(|error| system(&self.path, "fstat", error))
    }
}

/// One piece of memory for a call: start and length.
pub(super) struct Whole(pub *mut u8, pub usize);

impl Part for Whole {
    fn raw(&self) -> (*mut u8, usize) {
        (self.0, self.1)
    }
}

/// Opens the same file again, with O_DIRECT.
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
            // By the descriptor, because the path may name another file by now.
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

/// Checks with `statx` whether the file supports direct I/O at [`DIRECT_ALIGN`].
fn check_alignment(file: &File) -> Result<(), String> {
    let mut status = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: an empty path with AT_EMPTY_PATH names the descriptor; the kernel fills a structure of this type.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            status.as_mut_ptr(),
        )
    };
    // SAFETY: zero is a valid value for every field of this structure of integers, filled or not.
    let status = unsafe { status.assume_init() };
    if result != 0 || status.stx_mask & libc::STATX_DIOALIGN == 0 {
        // An old kernel, or a file system that does not report it. Opening with O_DIRECT shows whether it works.
        return Ok(());
    }
    match status.stx_dio_mem_align.max(status.stx_dio_offset_align) {
        0 => Err("the file system does not support direct I/O".to_owned()),
        align if u64::from(align) <= DIRECT_ALIGN => Ok(()),
        align => {
            Err(format!("the file system requires direct I/O in units of {align} bytes, not {DIRECT_ALIGN}"))
        }
    }
}
