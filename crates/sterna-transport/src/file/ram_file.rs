//! The first form of [`super::PageFile`], for those who have not moved: buffered, replaces what is there.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sterna_ram::RamSlice;

use crate::parts::Remaining;
use crate::{IoPart, TransportError};

/// A file that pages go into or come from, at offsets, from several threads at once.
///
/// A file that is being created lies beside its place under another name until [`RamFile::complete`];
/// dropped before that, it is removed. So the place holds a complete file or what it held before.
#[derive(Debug)]
pub struct RamFile {
    file: File,
    path: PathBuf,
    /// Where it lies meanwhile; none once it is complete, or if it was opened to be read.
    aside: Option<PathBuf>,
}

impl RamFile {
    /// Begins a new file for `path`.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn create(path: impl Into<PathBuf>) -> Result<RamFile, TransportError> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let path = path.into();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        loop {
            let number = COUNTER.fetch_add(1, Ordering::Relaxed);
            let aside = path.with_file_name(format!(".{name}.{}-{number}.partial", std::process::id()));
            match OpenOptions::new().read(true).write(true).create_new(true).open(&aside) {
                Ok(file) => return Ok(RamFile { file, path, aside: Some(aside) }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(system(&path, "open", error)),
            }
        }
    }

    /// Opens a complete file to read it.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn open(path: impl Into<PathBuf>) -> Result<RamFile, TransportError> {
        let path = path.into();
        match File::open(&path) {
            Ok(file) => Ok(RamFile { file, path, aside: None }),
            Err(error) => Err(system(&path, "open", error)),
        }
    }

    /// Its length in bytes.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn len_bytes(&self) -> Result<u64, TransportError> {
        let metadata = self.file.metadata().map_err(|error| system(&self.path, "fstat", error))?;
        Ok(metadata.len())
    }

    /// Writes all parts, one behind the other, from byte `offset` on.
    ///
    /// # Errors
    /// [`TransportError::System`].
    pub fn write_at(&self, offset: u64, parts: &[IoPart<'_>]) -> Result<(), TransportError> {
        let mut left = Remaining::new(parts);
        let mut at = offset;
        while left.bytes() > 0 {
            let mut vectors = left.vectors();
            // SAFETY: the vectors name the parts that `left` borrows, which are mapped; the kernel only
            // reads them.
            let moved = unsafe {
                libc::pwritev(
                    self.file.as_raw_fd(),
                    vectors.as_mut_ptr(),
                    vectors.count() as libc::c_int,
                    at as libc::off_t,
                )
            };
            match self.moved("pwritev", moved)? {
                Some(0) => return Err(system(&self.path, "pwritev", io::ErrorKind::WriteZero.into())),
                Some(moved) => {
                    left.advance(moved);
                    at += moved as u64;
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Fills windows of guest RAM from byte `offset` on.
    ///
    /// # Errors
    /// [`TransportError::FileEnd`], [`TransportError::System`].
    pub fn read_at(&self, offset: u64, parts: &[RamSlice<'_>]) -> Result<(), TransportError> {
        let mut left = Remaining::new(parts);
        let mut at = offset;
        while left.bytes() > 0 {
            let mut vectors = left.vectors();
            // SAFETY: the vectors name the parts that `left` borrows: mapped, writable guest RAM.
            let moved = unsafe {
                libc::preadv(
                    self.file.as_raw_fd(),
                    vectors.as_mut_ptr(),
                    vectors.count() as libc::c_int,
                    at as libc::off_t,
                )
            };
            match self.moved("preadv", moved)? {
                Some(0) => {
                    return Err(TransportError::FileEnd {
                        file: self.path.display().to_string(),
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

    /// Puts the file on the disk and into its place.
    ///
    /// # Errors
    /// [`TransportError::System`]; the place is as it was, unless only the last step (syncing the
    /// directory) failed.
    pub fn complete(mut self) -> Result<(), TransportError> {
        self.file.sync_all().map_err(|error| system(&self.path, "fsync", error))?;
        let Some(aside) = self.aside.take() else { return Ok(()) };
        if let Err(error) = std::fs::rename(&aside, &self.path) {
            self.aside = Some(aside);
            return Err(system(&self.path, "rename", error));
        }
        let directory = match self.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        File::open(directory)
            .and_then(|directory| directory.sync_all())
            .map_err(|error| system(&self.path, "fsync of the directory", error))
    }

    /// What a call moved; none if it was interrupted and is to be tried again.
    fn moved(&self, call: &'static str, result: isize) -> Result<Option<usize>, TransportError> {
        if result >= 0 {
            return Ok(Some(result as usize));
        }
        match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            error => Err(system(&self.path, call, error)),
        }
    }
}

impl Drop for RamFile {
    fn drop(&mut self) {
        if let Some(aside) = &self.aside {
            let _ = std::fs::remove_file(aside);
        }
    }
}

fn system(path: &Path, call: &'static str, source: io::Error) -> TransportError {
    TransportError::System { channel: path.display().to_string(), call, source }
}
