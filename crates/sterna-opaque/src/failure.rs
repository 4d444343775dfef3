//! Errors of images as errors of the migration that reads or writes them.

use sterna::error::MigrationError;
use sterna_image::ImageError;

/// The error of a migration whose image cannot be read or written.
pub(crate) fn image_failed(error: ImageError) -> MigrationError {
    MigrationError::system(error.to_string(), error)
}
