//! Opens images of a store, and lists their names.

use std::sync::Arc;

use super::image_store::ImageStore;
use super::keys::{IMAGES, NAMES};
use super::packs::PackSource;
use crate::blob::Blob;
use crate::digest::Digest;
use crate::error::StoreError;
use crate::image_name::check_name;
use crate::key::Key;
use crate::read::{Bases, StoredImage, link};

/// A name in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedImage {
    /// The image's name; a keyed digest of it if the image is encrypted with another key, or no key was given.
    pub name: String,
    /// Digest of the image.
    pub digest: Digest,
    /// Whether the image can be read with the store's key, or without one.
    pub is_readable: bool,
    /// Why it cannot be read.
    pub why: Option<String>,
}

impl ImageStore {
    /// All names, in the order of their keys.
    ///
    /// # Errors
    /// The storage's errors; [`StoreError::Broken`] for an object of a name without a digest.
    pub fn list(&self) -> Result<Vec<NamedImage>, StoreError> {
        let mut named = Vec::new();
        for key in self.keys(NAMES)? {
            let digest = match self.digest_at(&key) {
                // Removed since the list was made.
                Err(StoreError::Missing { .. }) => continue,
                digest => digest?,
            };
            let shown = key[NAMES.len()..].to_owned();
            let (name, why) = match self.open_one(&digest, &shown) {
                Ok(image) if image.is_encrypted() => (image.index().name.clone(), None),
                Ok(_) => (shown, None),
                Err(StoreError::KeyNeeded { .. } | StoreError::WrongKey { .. }) => (
                    shown,
                    Some("it is encrypted with another key: give the file of its key with --key".to_owned()),
                ),
                // One damaged image must not hide the others.
                Err(error @ StoreError::Missing { .. }) => (shown, Some(error.to_string())),
                Err(error) if error.is_image_at_fault() => (shown, Some(error.to_string())),
                Err(error) => return Err(error),
            };
            named.push(NamedImage { name, digest, is_readable: why.is_none(), why });
        }
        Ok(named)
    }

    /// Opens the image `name` with its bases, which are in the same store.
    ///
    /// # Errors
    /// [`StoreError::Missing`] or [`StoreError::Hidden`] if the store has no such name; the errors of images.
    pub fn image(&self, name: &str) -> Result<Arc<StoredImage>, StoreError> {
        check_name(name)?;
        let digest = self.digest_at(&self.name_key(name)).map_err(|error| match error {
            StoreError::Missing { .. } => self.missing(name),
            error => error,
        })?;
        link(self.open_one(&digest, name)?, self.key.as_ref(), self)
    }

    /// The error for a name that the store lacks, or that is encrypted with another key.
    pub(super) fn missing(&self, name: &str) -> StoreError {
        let (shown, has_key) = (self.shown(name), self.key.is_some());
        if has_key && self.digest_at(&format!("{NAMES}{name}")).is_ok() {
            return StoreError::NotEncrypted { name: shown };
        }
        // An error of the list is not the reason why the name is missing.
        let hidden = self.list().unwrap_or_default().iter().filter(|named| !named.is_readable).count();
        match hidden {
            0 => StoreError::Missing { name: shown },
            hidden => StoreError::Hidden { name: shown, has_key, hidden },
        }
    }

    /// Opens an image of the store without its base.
    pub(super) fn open_one(&self, digest: &Digest, name: &str) -> Result<StoredImage, StoreError> {
        let blob = self.objects.open(&format!("{IMAGES}{digest}"))?;
        let index_bytes = blob.len_bytes();
        // An image without encryption in a store with a key is read without it.
        let image = match StoredImage::open_one(Arc::clone(&blob), self.key.as_ref()) {
            Err(StoreError::NotEncrypted { .. }) => StoredImage::open_one(blob, None)?,
            image => image?,
        };
        if image.digest() != *digest {
            return Err(StoreError::Broken {
                name: self.shown(name),
                part: "the index",
                rule: format!("it is of image {}, and its key is {digest}", image.digest()),
                paragraph: "§10",
            });
        }
        let packs = image.index().packs.clone();
        let source = PackSource::new(self.clone(), self.shown(name), index_bytes, packs);
        Ok(image.with_source(Box::new(source)))
    }
}

impl Bases for ImageStore {
    fn find(&self, digest: &Digest, _: &str) -> Result<Option<Arc<dyn Blob>>, StoreError> {
        found(self.objects.open(&format!("{IMAGES}{digest}")))
    }

    fn open(&self, digest: &Digest, hint: &str, _: Option<&Key>) -> Result<Option<StoredImage>, StoreError> {
        found(self.open_one(digest, hint))
    }
}

fn found<T>(result: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(StoreError::Missing { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
