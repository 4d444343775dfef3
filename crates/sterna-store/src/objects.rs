//! The interface of an object storage: a directory, or a server that speaks S3.
//!
//! The store's logic (packs, images, garbage collection) uses nothing but this interface. Each write replaces the
//! whole object at one moment: a reader sees the object before or after the write, and nothing between.

use std::sync::Arc;
use std::time::SystemTime;

use crate::blob::Blob;
use crate::error::StoreError;

/// The version of an object: an ETag of S3, or what a directory has instead. Only equality counts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Tag(pub String);

/// One object in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// The object's key.
    pub key: String,
    /// Length in bytes.
    pub length_bytes: u64,
    /// Time of the last write by the storage's clock.
    pub modified: SystemTime,
    /// The object's version; none if the storage's list does not contain it.
    pub tag: Option<Tag>,
}

/// The condition of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition<'a> {
    /// No object has the key (`If-None-Match: *`).
    IfAbsent,
    /// The object has this version (`If-Match`).
    IfMatch(&'a Tag),
    /// Always.
    Always,
}

/// An object storage. Several threads may use it.
///
/// Keys are relative to the storage's prefix: parts of letters, digits, `-`, `_` and `.`, joined by `/`.
pub trait Objects: Send + Sync {
    /// The storage's address, for errors: `store:/var/lib/sterna`, `s3://bucket/prefix`.
    fn name(&self) -> &str;

    /// Reads a whole object of at most `limit_bytes` bytes, with its version.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::TooLarge`], [`StoreError::Io`], [`StoreError::Remote`].
    fn get(&self, key: &str, limit_bytes: u64) -> Result<(Vec<u8>, Tag), StoreError>;

    /// Opens an object for reads at random. A read fails with [`StoreError::Changed`] if the version changes.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Io`], [`StoreError::Remote`].
    fn open(&self, key: &str) -> Result<Arc<dyn Blob>, StoreError>;

    /// Writes a small object in one request, and returns its version.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] if the condition does not hold: the object is unchanged.
    fn put(&self, key: &str, bytes: &[u8], condition: Condition<'_>) -> Result<Tag, StoreError>;

    /// Begins to write a large object. No object is visible under the key before [`Upload::complete`].
    ///
    /// # Errors
    /// [`StoreError::Io`], [`StoreError::Remote`].
    fn upload(&self, key: &str) -> Result<Box<dyn Upload>, StoreError>;

    /// Gives every object whose key begins with `prefix` to `visit`, in ascending order of keys.
    ///
    /// # Errors
    /// The first error of `visit`; [`StoreError::Io`], [`StoreError::Remote`].
    fn list(
        &self,
        prefix: &str,
        visit: &mut dyn FnMut(Listed) -> Result<(), StoreError>,
    ) -> Result<(), StoreError>;

    /// Deletes an object. A missing object is no error.
    ///
    /// # Errors
    /// [`StoreError::Io`], [`StoreError::Remote`].
    fn delete(&self, key: &str) -> Result<(), StoreError>;

    /// Removes uploads that began before `before` and were neither completed nor aborted. Returns their number.
    ///
    /// # Errors
    /// [`StoreError::Io`], [`StoreError::Remote`].
    fn abort_uploads(&self, before: SystemTime) -> Result<u64, StoreError>;
}

/// A large object that is being written, front to back. Dropping it aborts the upload.
pub trait Upload: Send {
    /// Appends `bytes`.
    ///
    /// # Errors
    /// [`StoreError::Io`], [`StoreError::Remote`].
    fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError>;

    /// Makes the object durable, then visible under its key, and returns its version.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] if the condition does not hold: no object was changed.
    fn complete(self: Box<Self>, condition: Condition<'_>) -> Result<Tag, StoreError>;
}
