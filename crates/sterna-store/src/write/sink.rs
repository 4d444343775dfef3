//! Where the frames of a new image go.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::backlog::Backlog;
use crate::error::StoreError;
use crate::unfinished::Unfinished;

/// Receives frames from several threads. What is in it becomes visible with the completion, and disappears without it.
pub(crate) trait FrameSink: Send + Sync {
    /// Name of the image, for errors.
    fn name(&self) -> &str;

    /// Takes the header of an image whose frames follow it. The same header comes again with the completion.
    fn begin(&self, _header: &[u8]) -> Result<(), StoreError> {
        Ok(())
    }

    /// Keeps frames in `file`, too, so that they can be read back. For places that cannot be read before the end.
    fn keep_in(&self, _file: File) {}

    /// Whether frames can be read back only after [`keep_in`](Self::keep_in).
    fn needs_keeping(&self) -> bool {
        false
    }

    /// Stores a frame, and returns its pack and offset.
    fn append(&self, stored: &[u8]) -> Result<(u32, u64), StoreError>;

    /// Reads a frame back that [`append`](Self::append) stored.
    fn read_back(&self, pack: u32, offset: u64, to: &mut [u8]) -> Result<(), StoreError>;

    /// Makes all frames durable, and returns the identifiers of the packs; none for a plain file.
    fn flush(&self) -> Result<Vec<[u8; 16]>, StoreError>;

    /// Offset of the index, after all frames.
    fn end(&self) -> u64;

    /// Stores header, index and footer, and makes the image visible.
    fn complete(&mut self, header: &[u8], tail: &[u8]) -> Result<u64, StoreError>;
}

/// A plain file: written under a temporary name, synced, renamed.
pub(crate) struct FileSink {
    file: File,
    path: PathBuf,
    temporary: PathBuf,
    name: String,
    end: AtomicU64,
    replace: bool,
    is_complete: bool,
    backlog: Option<Backlog>,
    _unfinished: Unfinished,
}

impl FileSink {
    pub(crate) fn create(path: &Path, replace: bool, header_bytes: u64) -> Result<Self, StoreError> {
        let name = path.display().to_string();
        if !replace && path.symlink_metadata().is_ok() {
            return Err(StoreError::Conflict { name });
        }
        let temporary = temporary_name(path);
        let shown = temporary.display().to_string();
        let opened = OpenOptions::new().read(true).write(true).create_new(true).open(&temporary);
        let file = opened.map_err(|error| StoreError::io(&shown, "open", error))?;
        let end = AtomicU64::new(header_bytes);
        let removed = temporary.clone();
        let unfinished = Unfinished::new(move || drop(std::fs::remove_file(&removed)));
        let path = path.to_owned();
        Ok(Self {
            file,
            path,
            temporary,
            name,
            end,
            replace,
            is_complete: false,
            backlog: None,
            _unfinished: unfinished,
        })
    }

    /// Takes the first `end` bytes of another image, and its rights.
    pub(super) fn take(&self, from: &File, end: u64) -> Result<(), StoreError> {
        use std::io::{Seek, SeekFrom};
        use std::os::unix::fs::MetadataExt;
        let metadata = from.metadata().map_err(|error| self.failed("fstat", error))?;
        let mode = self.file.set_permissions(metadata.permissions());
        mode.map_err(|error| self.failed("fchmod", error))?;
        // Only root may give a file away. Without that right the file belongs to this user.
        let _ = std::os::unix::fs::fchown(&self.file, Some(metadata.uid()), Some(metadata.gid()));
        let (mut from, mut to) = (from, &self.file);
        from.seek(SeekFrom::Start(0)).map_err(|error| self.failed("lseek", error))?;
        // The kernel shares or copies the bytes, where the file system supports it.
        let copied = io::copy(&mut io::Read::take(&mut from, end), &mut to);
        match copied.map_err(|error| self.failed("copy_file_range", error))? {
            copied if copied == end => {}
            copied => return Err(StoreError::Torn { name: self.name.clone(), length_bytes: copied }),
        }
        self.end.store(end, Ordering::Relaxed);
        Ok(())
    }

    /// Makes writers wait while many bytes are before the disk.
    pub(super) fn bound_backlog(&mut self) -> Result<(), StoreError> {
        let started = Backlog::start(&self.file);
        self.backlog = Some(started.map_err(|error| self.failed("clone", error))?);
        Ok(())
    }

    fn failed(&self, call: &'static str, error: io::Error) -> StoreError {
        StoreError::io(&self.name, call, error)
    }
}

/// A name next to `path` that no other process and no other thread uses.
fn temporary_name(path: &Path) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}-{number}.sterna-tmp", std::process::id()));
    path.with_file_name(name)
}

impl FrameSink for FileSink {
    fn name(&self) -> &str {
        &self.name
    }

    fn append(&self, stored: &[u8]) -> Result<(u32, u64), StoreError> {
        let offset = self.end.fetch_add(stored.len() as u64, Ordering::Relaxed);
        self.file.write_all_at(stored, offset).map_err(|error| self.failed("write", error))?;
        if let Some(backlog) = &self.backlog {
            backlog.wrote(stored.len() as u64).map_err(|error| self.failed("fdatasync", error))?;
        }
        Ok((0, offset))
    }

    fn read_back(&self, _: u32, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        self.file.read_exact_at(to, offset).map_err(|error| self.failed("read", error))
    }

    fn flush(&self) -> Result<Vec<[u8; 16]>, StoreError> {
        Ok(Vec::new())
    }

    fn end(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }

    fn complete(&mut self, header: &[u8], tail: &[u8]) -> Result<u64, StoreError> {
        let end = self.end();
        self.file.write_all_at(header, 0).map_err(|error| self.failed("write", error))?;
        self.file.write_all_at(tail, end).map_err(|error| self.failed("write", error))?;
        self.file.sync_all().map_err(|error| self.failed("fsync", error))?;
        publish(&self.temporary, &self.path, self.replace)?;
        self.is_complete = true;
        Ok(end + tail.len() as u64)
    }
}

impl Drop for FileSink {
    fn drop(&mut self) {
        if !self.is_complete {
            // The file has no meaning without its index. Another process never waits for it.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Gives a synced file its name, and syncs the directory.
///
/// # Errors
/// [`StoreError::Conflict`] if `path` exists and may not be replaced; [`StoreError::Io`].
pub fn publish(temporary: &Path, path: &Path, replace: bool) -> Result<(), StoreError> {
    let name = path.display().to_string();
    let flags = match replace {
        true => rustix::fs::RenameFlags::empty(),
        false => rustix::fs::RenameFlags::NOREPLACE,
    };
    let renamed = rustix::fs::renameat_with(rustix::fs::CWD, temporary, rustix::fs::CWD, path, flags);
    match renamed {
        Ok(()) => {}
        Err(rustix::io::Errno::EXIST) => return Err(StoreError::Conflict { name }),
        // A file system without RENAME_NOREPLACE: a hard link fails if the name exists, too.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) if !replace => link(temporary, path, &name)?,
        Err(error) => return Err(StoreError::io(&name, "rename", error.into())),
    }
    sync_directory(path)
}

fn link(temporary: &Path, path: &Path, name: &str) -> Result<(), StoreError> {
    match std::fs::hard_link(temporary, path) {
        Ok(()) => {
            let _ = std::fs::remove_file(temporary);
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Err(StoreError::Conflict { name: name.to_owned() })
        }
        Err(error) => Err(StoreError::io(name, "link", error)),
    }
}

/// Makes the entry of `path` in its directory durable.
pub(crate) fn sync_directory(path: &Path) -> Result<(), StoreError> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let synced = File::open(parent).and_then(|directory| directory.sync_all());
    synced.map_err(|error| StoreError::io(&parent.display().to_string(), "fsync", error))
}
