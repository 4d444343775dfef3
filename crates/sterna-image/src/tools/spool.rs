//! Random access to images that have none: decompressed once into an unlinked file.

use std::path::{Path, PathBuf};

use crate::ImageError;
use crate::read::Image;

/// Where large temporary files go when nobody says.
pub fn default_directory() -> PathBuf {
    std::env::var_os("TMPDIR").filter(|dir| !dir.is_empty()).map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

/// The directory of a file.
pub fn beside(file: &Path) -> PathBuf {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => ".".into(),
    }
}

/// An image with the same pages at known places; none if `image` has them there itself.
///
/// # Errors
/// As [`Image::spool`].
pub fn for_random_access(image: &Image, directory: PathBuf) -> Result<Option<Image>, ImageError> {
    match image.mapped() {
        Some(_) => Ok(None),
        None => image.spool(&directory).map(Some),
    }
}
