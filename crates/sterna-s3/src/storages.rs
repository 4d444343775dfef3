//! Opens buckets by their addresses.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna_store::{CachedObjects, Objects, RangeCache, Storages, StoreError};

use crate::objects::S3Objects;
use crate::options::S3Options;

/// The buckets of one server. Storages of the same address share their connections.
pub struct S3Storages {
    options: S3Options,
    cache: Arc<RangeCache>,
    open: Mutex<HashMap<String, Arc<dyn Objects>>>,
}

impl S3Storages {
    /// Takes the settings of all buckets; bucket and prefix in `options` are not used. Objects are read through `cache`.
    pub fn new(options: S3Options, cache: RangeCache) -> Self {
        Self { options, cache: Arc::new(cache), open: Mutex::default() }
    }
}

impl Storages for S3Storages {
    fn open(&self, address: &str) -> Result<Arc<dyn Objects>, StoreError> {
        let mut open = self.open.lock();
        if let Some(objects) = open.get(address) {
            return Ok(Arc::clone(objects));
        }
        let rest = address.strip_prefix("s3://").unwrap_or_default();
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            let text = format!("{address} names no bucket: write s3://BUCKET or s3://BUCKET/PREFIX");
            return Err(StoreError::Request(text));
        }
        let prefix = prefix.trim_matches('/').to_owned();
        let options = S3Options { bucket: bucket.to_owned(), prefix, ..self.options.clone() };
        let objects: Arc<dyn Objects> =
            Arc::new(CachedObjects::new(Arc::new(S3Objects::new(options)?), Arc::clone(&self.cache)));
        open.insert(address.to_owned(), Arc::clone(&objects));
        Ok(objects)
    }
}
