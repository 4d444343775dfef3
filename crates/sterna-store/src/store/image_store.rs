//! A store of images: its storage, its key, and the objects of names.

use std::sync::Arc;

use super::keys::NAMES;
use crate::digest::Digest;
use crate::error::StoreError;
use crate::image_name::check_name;
use crate::key::{Crypt, Key};
use crate::objects::Objects;

/// Limit of the object of a name in bytes.
pub(super) const NAME_OBJECT_MOST: u64 = 128;

/// A store of images.
#[derive(Clone)]
pub struct ImageStore {
    pub(super) objects: Arc<dyn Objects>,
    pub(super) key: Option<Key>,
}

impl std::fmt::Debug for ImageStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageStore").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl ImageStore {
    /// Takes a storage. `key` is for encrypted images.
    pub fn new(objects: Arc<dyn Objects>, key: Option<Key>) -> Self {
        Self { objects, key }
    }

    /// The storage's address.
    pub fn name(&self) -> &str {
        self.objects.name()
    }

    /// Removes a name. The image's frames stay until a garbage collection.
    ///
    /// # Errors
    /// [`StoreError::Missing`] or [`StoreError::Hidden`] if the store has no such name.
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        check_name(name)?;
        let key = self.name_key(name);
        match self.objects.get(&key, NAME_OBJECT_MOST) {
            Ok(_) => self.objects.delete(&key),
            Err(StoreError::Missing { .. }) => Err(self.missing(name)),
            Err(error) => Err(error),
        }
    }

    /// The key of the object of a name.
    pub(super) fn name_key(&self, name: &str) -> String {
        match &self.key {
            None => format!("{NAMES}{name}"),
            key => format!("{NAMES}{}", Crypt::new(key.as_ref()).digest(&[b"name", name.as_bytes()])),
        }
    }

    /// The name of an image with the store's address, for errors.
    pub(super) fn shown(&self, name: &str) -> String {
        format!("{}#{name}", self.name())
    }

    /// The digest in the object of a name.
    pub(super) fn digest_at(&self, key: &str) -> Result<Digest, StoreError> {
        let (bytes, _) = self.objects.get(key, NAME_OBJECT_MOST)?;
        let text = String::from_utf8_lossy(&bytes);
        text.trim().parse().map_err(|rule| StoreError::Broken {
            name: format!("{}/{key}", self.name()),
            part: "the object of a name",
            rule,
            paragraph: "§10",
        })
    }

    /// The keys that begin with `prefix`.
    pub(super) fn keys(&self, prefix: &str) -> Result<Vec<String>, StoreError> {
        let mut keys = Vec::new();
        self.objects.list(prefix, &mut |listed| {
            keys.push(listed.key);
            Ok(())
        })?;
        Ok(keys)
    }
}
