//! The object storages of this process, which are found by their addresses.
//!
//! This crate sends no requests. The program that has a client of object storages gives it here once, and every command and
//! library that takes the path of an image takes an address, too.

use std::path::Path;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::error::StoreError;
use crate::objects::Objects;

/// The scheme of addresses of object storages.
pub(crate) const SCHEME: &str = "s3://";

static STORAGES: RwLock<Option<Arc<dyn Storages>>> = RwLock::new(None);

/// Opens object storages.
pub trait Storages: Send + Sync {
    /// Opens the storage at `address`: `s3://BUCKET` or `s3://BUCKET/PREFIX`.
    ///
    /// # Errors
    /// [`StoreError::Request`] for an address without a bucket; [`StoreError::Remote`].
    fn open(&self, address: &str) -> Result<Arc<dyn Objects>, StoreError>;
}

/// From now on, addresses in this process are opened by `storages`.
pub fn use_storages(storages: Arc<dyn Storages>) {
    *STORAGES.write() = Some(storages);
}

/// Opens the object storage at `address`.
///
/// # Errors
/// [`StoreError::Request`] if this process has no client for it; the errors of [`Storages::open`].
pub fn storage(address: &str) -> Result<Arc<dyn Objects>, StoreError> {
    let storages = STORAGES.read().clone();
    let Some(storages) = storages else {
        let text =
            format!("{address}: this program has no client for object storages; copy the image into a file");
        return Err(StoreError::Request(text));
    };
    storages.open(address)
}

/// Whether a path is an address of an object storage.
pub(crate) fn is_address(path: &Path) -> bool {
    path.to_str().is_some_and(|text| text.starts_with(SCHEME))
}
