//! The places of images: files, and names in stores.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::directory::DirectoryObjects;
use super::image_store::ImageStore;
use crate::error::StoreError;
use crate::key::Key;

/// Where an image is, as a user writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A file.
    File(PathBuf),
    /// `store:DIRECTORY#NAME`: a name in the store in a directory.
    Store {
        /// The store's directory.
        directory: PathBuf,
        /// The image's name.
        name: String,
    },
}

impl Place {
    /// Tells the places apart. A path without `store:` at its start is a file.
    ///
    /// # Errors
    /// [`StoreError::Request`] if the name is missing.
    pub fn parse(path: &Path) -> Result<Self, StoreError> {
        let Some(rest) = path.to_str().and_then(|text| text.strip_prefix("store:")) else {
            return Ok(Self::File(path.to_owned()));
        };
        match rest.rsplit_once('#') {
            Some((directory, name)) if !directory.is_empty() && !name.is_empty() => {
                Ok(Self::Store { directory: directory.into(), name: name.to_owned() })
            }
            _ => {
                let text = format!("{} names no image: write store:DIRECTORY#NAME", path.display());
                Err(StoreError::Request(text))
            }
        }
    }

    /// The store in `directory`; `is_new` makes it if it is missing.
    ///
    /// # Errors
    /// [`StoreError::Missing`], [`StoreError::Io`].
    pub fn store(directory: &Path, key: Option<Key>, is_new: bool) -> Result<ImageStore, StoreError> {
        let objects = match is_new {
            true => DirectoryObjects::create(directory)?,
            false => DirectoryObjects::open(directory)?,
        };
        Ok(ImageStore::new(Arc::new(objects), key))
    }
}
