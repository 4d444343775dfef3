//! The places of images as users write them: files, objects, and names in stores.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::blob::{Blob, FileBlob};
use crate::error::StoreError;
use crate::image_name::check_name;
use crate::storages::{SCHEME, is_address, storage};

/// End of the keys of images that are objects of their own.
const EXTENSION: &str = ".sterna";

/// Where an image is, as a user writes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A file.
    File(PathBuf),
    /// `s3://BUCKET/KEY.sterna`: an object that contains all frames.
    Object {
        /// Address of the storage with everything before the last part of the key: `s3://BUCKET/PREFIX`.
        storage: String,
        /// The last part of the key.
        key: String,
    },
    /// `store:DIRECTORY#NAME` or `s3://BUCKET/PREFIX#NAME`: a name in a store.
    Store {
        /// The store's directory, or its address `s3://BUCKET/PREFIX`.
        directory: PathBuf,
        /// The image's name.
        name: String,
    },
}

impl Place {
    /// Tells the places apart. A path without `store:` or `s3://` at its start is a file.
    ///
    /// # Errors
    /// [`StoreError::Request`] if the name of the image is missing, or is no name for an image.
    pub fn parse(path: &Path) -> Result<Self, StoreError> {
        let is_address = is_address(path);
        let rest =
            path.to_str().and_then(|text| if is_address { Some(text) } else { text.strip_prefix("store:") });
        let Some(rest) = rest else { return Ok(Self::File(path.to_owned())) };
        match rest.rsplit_once('#') {
            Some((directory, name)) if !directory.is_empty() && directory != SCHEME && !name.is_empty() => {
                check_name(name)?;
                return Ok(Self::Store { directory: directory.into(), name: name.to_owned() });
            }
            Some(_) => {}
            None if is_address => {
                let parts = rest.rsplit_once('/').filter(|(storage, key)| {
                    storage.len() > SCHEME.len() && key.len() > EXTENSION.len() && key.ends_with(EXTENSION)
                });
                if let Some((storage, key)) = parts {
                    return Ok(Self::Object { storage: storage.to_owned(), key: key.to_owned() });
                }
            }
            None => {}
        }
        let wanted = match is_address {
            true => {
                "s3://BUCKET/PREFIX#NAME for an image in a store, or s3://BUCKET/KEY.sterna for an object of its own"
            }
            false => "store:DIRECTORY#NAME",
        };
        Err(StoreError::Request(format!("{} names no image: write {wanted}", path.display())))
    }

    /// Whether the path has the form of an image in Sterna's own format that is in no file.
    pub fn is_elsewhere(path: &Path) -> bool {
        is_address(path) || path.to_str().is_some_and(|text| text.starts_with("store:"))
    }

    /// Opens the file or the object at this place.
    ///
    /// # Errors
    /// [`StoreError::Request`] for a name in a store, whose frames are in several objects; the errors of the storage.
    pub fn blob(&self) -> Result<Arc<dyn Blob>, StoreError> {
        match self {
            Self::File(path) => Ok(Arc::new(FileBlob::open(path)?)),
            Self::Object { storage: address, key } => storage(address)?.open(key),
            Self::Store { directory, name } => {
                let text = format!("{}#{name} is in a store: it is no file of its own", directory.display());
                Err(StoreError::Request(text))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Option<Place> {
        Place::parse(Path::new(text)).ok()
    }

    #[test]
    fn syntax_tells_files_objects_and_names_in_stores_apart() {
        let store = |directory: &str, name: &str| {
            Some(Place::Store { directory: directory.into(), name: name.to_owned() })
        };
        let object = |storage: &str, key: &str| {
            Some(Place::Object { storage: storage.to_owned(), key: key.to_owned() })
        };

        assert_eq!(parse("a/s3://b"), Some(Place::File("a/s3://b".into())));
        assert_eq!(parse("store:/var/x#web1"), store("/var/x", "web1"));
        assert_eq!(parse("s3://b/p/q#web1"), store("s3://b/p/q", "web1"));
        assert_eq!(parse("s3://b#web1"), store("s3://b", "web1"));
        assert_eq!(parse("store:s3://b/p#web1"), store("s3://b/p", "web1"));
        assert_eq!(parse("s3://b/web1.sterna"), object("s3://b", "web1.sterna"));
        assert_eq!(parse("s3://b/p/web1.sterna"), object("s3://b/p", "web1.sterna"));
        assert_eq!(parse("s3://b/p.sterna#web1"), store("s3://b/p.sterna", "web1"));
        for wrong in [
            "store:/var/x",
            "store:#a",
            "s3://b/p",
            "s3://b.sterna",
            "s3:///a.sterna",
            "s3://b/.sterna",
            "s3://#a",
            "store:/d#a/b",
            "s3://b/p#.a",
        ] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
