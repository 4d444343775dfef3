//! Random access to bytes that do not change: a file, an object, or memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::OFlags;

use crate::error::StoreError;

/// Bytes that can be read at random and do not change while they are open.
///
/// Implementations are a local file, an object of an object storage, and memory. Several threads may read.
pub trait Blob: Send + Sync {
    /// Length in bytes. It is known when the blob is opened, so that no request is sent.
    fn len_bytes(&self) -> u64;

    /// Fills `to` with the bytes from `offset`.
    ///
    /// # Errors
    /// [`StoreError::Torn`] if the blob ends before; [`StoreError::Changed`] if its content changed since it was
    /// opened (another modification time, another ETag); [`StoreError::Io`], [`StoreError::Remote`].
    fn read_exact_at(&self, offset: u64, to: &mut [u8]) -> Result<(), StoreError>;

    /// The path or address, for errors.
    fn name(&self) -> &str;

    /// Whether a read has a high latency, so that few large reads are better than many small ones.
    fn is_remote(&self) -> bool {
        false
    }

    /// The version of the content, such as an ETag; none if the blob has no version beyond its name.
    fn version(&self) -> Option<&str> {
        None
    }

    /// The underlying file; none without a file.
    fn file(&self) -> Option<&File> {
        None
    }
}

/// A local file as a [`Blob`].
#[derive(Debug)]
pub struct FileBlob {
    file: File,
    name: String,
    length_bytes: u64,
    modified: (i64, i64),
}

impl FileBlob {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// [`StoreError::Missing`] if no file is there; [`StoreError::Io`].
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        use std::os::unix::fs::OpenOptionsExt;
        let name = path.display().to_string();
        // Opening a pipe without a writer would block. The flag has no effect on files.
        let flags = OFlags::NONBLOCK.bits() as i32;
        let opened = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = opened.map_err(|error| StoreError::io(&name, "open", error))?;
        Self::of(file, &name)
    }

    /// Takes an open `file`; `name` appears in errors.
    ///
    /// # Errors
    /// [`StoreError::Io`] if the file's length cannot be read.
    pub fn of(file: File, name: &str) -> Result<Self, StoreError> {
        let metadata = file.metadata().map_err(|error| StoreError::io(name, "fstat", error))?;
        let modified = (metadata.mtime(), metadata.mtime_nsec());
        Ok(Self { file, name: name.to_owned(), length_bytes: metadata.len(), modified })
    }

    /// Whether the file has the length and the modification time that it had when it was opened.
    fn is_unchanged(&self) -> bool {
        self.file.metadata().is_ok_and(|now| {
            now.len() == self.length_bytes && (now.mtime(), now.mtime_nsec()) == self.modified
        })
    }
}

impl Blob for FileBlob {
    fn len_bytes(&self) -> u64 {
        self.length_bytes
    }

    fn read_exact_at(&self, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        match FileExt::read_exact_at(&self.file, to, offset) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => match self.is_unchanged() {
                true => Err(StoreError::Torn { name: self.name.clone(), length_bytes: self.length_bytes }),
                false => Err(StoreError::Changed { name: self.name.clone() }),
            },
            Err(error) => Err(StoreError::io(&self.name, "read", error)),
        }
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn file(&self) -> Option<&File> {
        Some(&self.file)
    }
}

/// Bytes in memory as a [`Blob`], for tests and for small objects.
#[derive(Debug, Clone)]
pub struct MemoryBlob {
    bytes: Vec<u8>,
    name: String,
}

impl MemoryBlob {
    /// Takes `bytes`; `name` appears in errors.
    pub fn new(bytes: Vec<u8>, name: &str) -> Self {
        Self { bytes, name: name.to_owned() }
    }
}

impl Blob for MemoryBlob {
    fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_exact_at(&self, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        let rest = usize::try_from(offset).ok().and_then(|at| self.bytes.get(at..)).unwrap_or_default();
        let Some(found) = rest.get(..to.len()) else {
            return Err(StoreError::Torn { name: self.name.clone(), length_bytes: self.bytes.len() as u64 });
        };
        to.copy_from_slice(found);
        Ok(())
    }

    fn name(&self) -> &str {
        &self.name
    }
}
