//! Random access to images without it: decompresses them once into an unlinked file.

use std::path::{Path, PathBuf};

use crate::ImageError;
use crate::read::Image;

/// The default directory of large temporary files: `$TMPDIR`, otherwise `/var/tmp`.
pub fn default_directory() -> PathBuf {
    std::env::var_os("TMPDIR").filter(|dir| !dir.is_empty()).map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

/// The directory that contains `file`.
pub fn beside(file: &Path) -> PathBuf {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => ".".into(),
    }
}

/// Makes a spool of `image` for random access; none if it is mapped-ram already.
///
/// # Errors
/// The errors of [`Image::spool`].
pub fn for_random_access(image: &Image, directory: PathBuf) -> Result<Option<Image>, ImageError> {
    match image.mapped() {
        Some(_) => Ok(None),
        None => image.spool(&directory).map(Some),
    }
}
