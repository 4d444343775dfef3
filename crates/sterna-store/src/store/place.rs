//! Opens the stores of places, and images wherever they are.

use std::path::Path;
use std::sync::Arc;

use super::directory::DirectoryObjects;
use super::image_store::ImageStore;
use crate::blob::Blob;
use crate::digest::Digest;
use crate::error::StoreError;
use crate::key::Key;
use crate::layout::Block;
use crate::objects::Objects;
use crate::place::Place;
use crate::read::{Bases, FileBases, StoredImage};
use crate::storages::{is_address, storage};
use crate::write::{ImageWriter, WriteOptions};

impl Place {
    /// The store in `directory`, or at that address. `is_new` makes the directory if it is missing.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Io`], [`StoreError::Remote`].
    pub fn store(directory: &Path, key: Option<Key>, is_new: bool) -> Result<ImageStore, StoreError> {
        let objects: Arc<dyn Objects> = if is_address(directory) {
            storage(&directory.to_string_lossy())?
        } else if is_new {
            Arc::new(DirectoryObjects::create(directory)?)
        } else {
            Arc::new(DirectoryObjects::open(directory)?)
        };
        Ok(ImageStore::new(objects, key))
    }

    /// Opens the image at this place with its bases: those that `bases` knows, and those beside it.
    ///
    /// # Errors
    /// The errors of [`StoredImage::open`]; those of the storage.
    pub fn open(&self, key: Option<&Key>, bases: FileBases) -> Result<Arc<StoredImage>, StoreError> {
        match self {
            Self::File(path) => StoredImage::open_blob(self.blob()?, key, &bases.in_directory_of(path)),
            Self::Object { storage: address, key: object } => {
                let objects = storage(address)?;
                let blob = objects.open(object)?;
                StoredImage::open_blob(blob, key, &ObjectBases { objects, named: bases })
            }
            Self::Store { directory, name } => Self::store(directory, key.cloned(), false)?.image(name),
        }
    }

    /// Begins an image at this place.
    ///
    /// # Errors
    /// The errors of [`ImageWriter::create`] and [`ImageStore::writer`].
    pub fn writer(&self, blocks: Vec<Block>, options: WriteOptions) -> Result<ImageWriter, StoreError> {
        match self {
            Self::File(path) => ImageWriter::create(path, blocks, options),
            Self::Object { storage: address, key } => {
                ImageWriter::create_object(storage(address)?, key, blocks, options)
            }
            Self::Store { directory, name } => {
                Self::store(directory, options.key.clone(), true)?.writer(name, blocks, options)
            }
        }
    }
}

/// Bases are files that the caller names, or objects beside the layer.
struct ObjectBases {
    objects: Arc<dyn Objects>,
    named: FileBases,
}

impl Bases for ObjectBases {
    fn find(&self, _: &Digest, hint: &str) -> Result<Option<Arc<dyn Blob>>, StoreError> {
        if hint.is_empty() || hint.contains('/') {
            return Ok(None);
        }
        match self.objects.open(hint) {
            Err(StoreError::Missing { .. }) => Ok(None),
            found => found.map(Some),
        }
    }

    fn open(
        &self,
        digest: &Digest,
        hint: &str,
        key: Option<&Key>,
    ) -> Result<Option<StoredImage>, StoreError> {
        match self.named.open(digest, hint, key)? {
            Some(base) => Ok(Some(base)),
            None => self.find(digest, hint)?.map(|blob| StoredImage::open_one(blob, key)).transpose(),
        }
    }
}
