//! An object storage in a directory.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use crate::blob::{Blob, FileBlob};
use crate::error::StoreError;
use crate::objects::{Condition, Listed, Objects, Tag, Upload};
use crate::write::{publish, sync_directory};

/// Directory of unfinished objects, inside of the storage's directory.
const STAGING: &str = ".staging";
/// The file that is locked while an object is compared and replaced.
const LOCK: &str = ".lock";

/// Objects are files in a directory, and their keys are paths in it.
///
/// Processes on one host, or on hosts that share a file system with working locks, may use it at the same time.
#[derive(Debug)]
pub struct DirectoryObjects {
    directory: PathBuf,
    name: String,
}

impl DirectoryObjects {
    /// Opens the storage in `directory`, which must exist.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Io`].
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        let name = format!("store:{}", directory.display());
        let found = directory.metadata().map_err(|error| StoreError::io(&name, "stat", error))?;
        if !found.is_dir() {
            return Err(StoreError::Request(format!(
                "{name} is no directory; give the directory of a store"
            )));
        }
        Ok(Self { directory: directory.to_owned(), name })
    }

    /// Like [`open`](Self::open), but makes the directory if it is missing.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn create(directory: &Path) -> Result<Self, StoreError> {
        let made = std::fs::create_dir_all(directory);
        made.map_err(|error| StoreError::io(&directory.display().to_string(), "mkdir", error))?;
        Self::open(directory)
    }

    fn path(&self, key: &str) -> Result<PathBuf, StoreError> {
        let is_plain =
            |part: &str| !part.is_empty() && !part.starts_with('.') && part.bytes().all(is_plain_byte);
        if !key.split('/').all(is_plain) {
            return Err(StoreError::Request(format!(
                "{key:?} is not a key of an object: use letters, digits, - _ ."
            )));
        }
        Ok(self.directory.join(key))
    }

    fn shown(&self, key: &str) -> String {
        format!("{}/{key}", self.name)
    }

    /// Makes an empty file for an object, and the directory of its key.
    fn stage(&self, path: &Path, shown: &str) -> Result<(File, PathBuf), StoreError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let staging = self.directory.join(STAGING);
        for directory in [Some(staging.as_path()), path.parent()].into_iter().flatten() {
            std::fs::create_dir_all(directory).map_err(|error| StoreError::io(shown, "mkdir", error))?;
        }
        let temporary = staging.join(format!("{}-{number}-{:x}", std::process::id(), fresh(shown)?));
        let opened = OpenOptions::new().write(true).create_new(true).open(&temporary);
        Ok((opened.map_err(|error| StoreError::io(shown, "open", error))?, temporary))
    }

    /// Gives a synced file its key.
    fn place(&self, key: &str, temporary: &Path, condition: Condition<'_>) -> Result<(), StoreError> {
        let (path, shown) = (self.path(key)?, self.shown(key));
        match condition {
            Condition::Always => publish(temporary, &path, true),
            Condition::IfAbsent => match publish(temporary, &path, false) {
                Err(StoreError::Conflict { .. }) => Err(StoreError::Conflict { name: shown }),
                done => done,
            },
            Condition::IfMatch(tag) => {
                let _lock = self.lock()?;
                match self.get(key, u64::MAX) {
                    Ok((_, now)) if now == *tag => publish(temporary, &path, true),
                    Ok(_) | Err(StoreError::Missing { .. }) => Err(StoreError::Conflict { name: shown }),
                    Err(error) => Err(error),
                }
            }
        }
    }

    fn lock(&self) -> Result<File, StoreError> {
        let path = self.directory.join(LOCK);
        let failed = |call| move |error| StoreError::io(&self.name, call, error);
        let opened = OpenOptions::new().create(true).truncate(false).write(true).open(path);
        let file = opened.map_err(failed("open"))?;
        file.lock().map_err(failed("flock"))?;
        Ok(file)
    }

    fn walk(
        &self,
        directory: &Path,
        key: &str,
        prefix: &str,
        visit: &mut dyn FnMut(Listed) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let failed = |error| StoreError::io(&self.name, "readdir", error);
        let mut names = Vec::new();
        for entry in directory.read_dir().map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            if !name.starts_with('.') {
                names.push((name, entry.path()));
            }
        }
        names.sort();
        for (name, path) in names {
            let key = if key.is_empty() { name } else { format!("{key}/{name}") };
            // Another process may remove objects while the list is made.
            let Ok(metadata) = path.metadata() else { continue };
            let below = format!("{key}/");
            if metadata.is_dir() && (below.starts_with(prefix) || prefix.starts_with(&below)) {
                self.walk(&path, &key, prefix, visit)?;
            } else if metadata.is_file() && key.starts_with(prefix) {
                let modified = metadata.modified().map_err(failed)?;
                visit(Listed { key, length_bytes: metadata.len(), modified, tag: None })?;
            }
        }
        Ok(())
    }
}

impl Objects for DirectoryObjects {
    fn name(&self) -> &str {
        &self.name
    }

    fn get(&self, key: &str, limit_bytes: u64) -> Result<(Vec<u8>, Tag), StoreError> {
        let blob = self.open(key)?;
        if blob.len_bytes() > limit_bytes {
            return Err(StoreError::TooLarge { name: self.shown(key), limit_bytes });
        }
        let mut bytes = vec![0; blob.len_bytes() as usize];
        blob.read_exact_at(0, &mut bytes)?;
        let tag = tag(&bytes);
        Ok((bytes, tag))
    }

    fn open(&self, key: &str) -> Result<Arc<dyn Blob>, StoreError> {
        let (path, shown) = (self.path(key)?, self.shown(key));
        let file = File::open(path).map_err(|error| StoreError::io(&shown, "open", error))?;
        Ok(Arc::new(FileBlob::of(file, &shown)?))
    }

    fn put(&self, key: &str, bytes: &[u8], condition: Condition<'_>) -> Result<Tag, StoreError> {
        let mut upload = self.upload(key)?;
        upload.write(bytes)?;
        upload.complete(condition)?;
        Ok(tag(bytes))
    }

    fn upload(&self, key: &str) -> Result<Box<dyn Upload>, StoreError> {
        let (path, shown) = (self.path(key)?, self.shown(key));
        let (file, temporary) = self.stage(&path, &shown)?;
        let objects = Self { directory: self.directory.clone(), name: self.name.clone() };
        let hasher = blake3::Hasher::new();
        Ok(Box::new(FileUpload { objects, key: key.to_owned(), file, temporary, hasher }))
    }

    fn list(
        &self,
        prefix: &str,
        visit: &mut dyn FnMut(Listed) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.walk(&self.directory, "", prefix, visit)
    }

    fn delete(&self, key: &str) -> Result<(), StoreError> {
        let (path, shown) = (self.path(key)?, self.shown(key));
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(StoreError::io(&shown, "unlink", error)),
            Ok(()) => sync_directory(&path),
        }
    }

    fn abort_uploads(&self, before: SystemTime) -> Result<u64, StoreError> {
        let Ok(entries) = self.directory.join(STAGING).read_dir() else { return Ok(0) };
        let mut removed = 0;
        for entry in entries.flatten() {
            let is_old =
                entry.metadata().and_then(|metadata| metadata.modified()).is_ok_and(|time| time < before);
            removed += u64::from(is_old && std::fs::remove_file(entry.path()).is_ok());
        }
        Ok(removed)
    }
}

/// An object that is being written.
struct FileUpload {
    objects: DirectoryObjects,
    key: String,
    file: File,
    temporary: PathBuf,
    hasher: blake3::Hasher,
}

impl Upload for FileUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        let shown = self.objects.shown(&self.key);
        self.hasher.update(bytes);
        self.file.write_all(bytes).map_err(|error| StoreError::io(&shown, "write", error))
    }

    fn complete(self: Box<Self>, condition: Condition<'_>) -> Result<Tag, StoreError> {
        let shown = self.objects.shown(&self.key);
        self.file.sync_all().map_err(|error| StoreError::io(&shown, "fsync", error))?;
        self.objects.place(&self.key, &self.temporary, condition)?;
        Ok(Tag(self.hasher.finalize().to_hex().to_string()))
    }
}

impl Drop for FileUpload {
    fn drop(&mut self) {
        // After the completion the file has another name, and nothing is removed.
        let _ = std::fs::remove_file(&self.temporary);
    }
}

/// The version of an object is its content.
fn tag(bytes: &[u8]) -> Tag {
    Tag(blake3::hash(bytes).to_hex().to_string())
}

fn is_plain_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')
}

fn fresh(name: &str) -> Result<u64, StoreError> {
    let mut bytes = [0; 8];
    crate::write::random(&mut bytes, name)?;
    Ok(u64::from_le_bytes(bytes))
}
