//! Stores the recorded working set in an image in Sterna's own format.

use std::path::Path;

use sterna_store::{PageRange, Place, StoreError, StoredImage, put_working_set};

use crate::error::ImageError;
use crate::read::Access;

/// Stores `ranges` as the working set of `image`, which was opened at `path`, in a file or in a store.
///
/// The image's digest stays the same, so that its layers keep their base.
///
/// # Errors
/// [`StoreError::Changed`](sterna_store::StoreError::Changed) in [`ImageError::Store`] if `path` has another image by now; the
/// errors of writing. Then the image is unchanged.
pub fn store_working_set(
    path: &Path,
    access: &Access,
    image: &StoredImage,
    ranges: &[PageRange],
) -> Result<(), ImageError> {
    match Place::parse(path)? {
        Place::File(path) => put_working_set(&path, access.key.as_ref(), image.digest(), ranges)?,
        Place::Object { .. } => {
            let text = format!(
                "{}: a working set cannot be added to an object, which is written once. Record into a file (--record FILE), \
                 or keep the image in a store",
                path.display()
            );
            return Err(StoreError::Request(text).into());
        }
        Place::Store { directory, name } => {
            let store = Place::store(&directory, access.key.clone(), false)?;
            store.put_working_set(&name, image.digest(), ranges)?;
        }
    }
    Ok(())
}
