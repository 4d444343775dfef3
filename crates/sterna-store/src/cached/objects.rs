//! An object storage whose objects are read through a cache.

use std::sync::Arc;
use std::time::SystemTime;

use super::ranges::{CachedBlob, RangeCache};
use crate::blob::Blob;
use crate::error::StoreError;
use crate::objects::{Condition, Listed, Objects, Tag, Upload};

/// A storage with a cache. Opening an object asks the storage for the version, so that a replaced object is never read from
/// the cache.
pub struct CachedObjects {
    inner: Arc<dyn Objects>,
    cache: Arc<RangeCache>,
}

impl CachedObjects {
    /// Reads objects of `inner` through `cache`, which several storages may share.
    pub fn new(inner: Arc<dyn Objects>, cache: Arc<RangeCache>) -> Self {
        Self { inner, cache }
    }
}

impl Objects for CachedObjects {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn get(&self, key: &str, limit_bytes: u64) -> Result<(Vec<u8>, Tag), StoreError> {
        self.inner.get(key, limit_bytes)
    }

    fn open(&self, key: &str) -> Result<Arc<dyn Blob>, StoreError> {
        let blob = self.inner.open(key)?;
        // Without a version, the cache could not tell that the object was replaced.
        let Some(version) = blob.version().map(str::to_owned).filter(|_| blob.is_remote()) else {
            return Ok(blob);
        };
        Ok(Arc::new(CachedBlob::new(blob, &version, Arc::clone(&self.cache))))
    }

    fn put(&self, key: &str, bytes: &[u8], condition: Condition<'_>) -> Result<Tag, StoreError> {
        self.inner.put(key, bytes, condition)
    }

    fn upload(&self, key: &str) -> Result<Box<dyn Upload>, StoreError> {
        self.inner.upload(key)
    }

    fn list(
        &self,
        prefix: &str,
        visit: &mut dyn FnMut(Listed) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.inner.list(prefix, visit)
    }

    fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.inner.delete(key)
    }

    fn abort_uploads(&self, before: SystemTime) -> Result<u64, StoreError> {
        self.inner.abort_uploads(before)
    }
}
