//! Stores the recorded working set in an image of a store.

use super::image_store::ImageStore;
use super::keys::IMAGES;
use crate::blob::MemoryBlob;
use crate::digest::Digest;
use crate::error::StoreError;
use crate::image_name::check_name;
use crate::layout::{INDEX_MOST, PageRange};
use crate::objects::Condition;
use crate::read::StoredImage;
use crate::write::with_working_set;

/// Attempts while other processes change the same image.
const ATTEMPTS: usize = 5;

impl ImageStore {
    /// Stores `ranges` as the working set of the image with `digest`, which `name` leads to. Every name of the image gets it.
    ///
    /// # Errors
    /// [`StoreError::Changed`] if the name leads to another image by now; [`StoreError::Request`] for ranges that are not in
    /// its RAM; the storage's errors. Then the image is unchanged.
    pub fn put_working_set(
        &self,
        name: &str,
        digest: Digest,
        ranges: &[PageRange],
    ) -> Result<(), StoreError> {
        check_name(name)?;
        if self.digest_at(&self.name_key(name))? != digest {
            return Err(StoreError::Changed { name: self.shown(name) });
        }
        let key = format!("{IMAGES}{digest}");
        for _ in 1..ATTEMPTS {
            match self.replace(&key, name, ranges) {
                Err(StoreError::Conflict { .. }) => {}
                done => return done,
            }
        }
        self.replace(&key, name, ranges)
    }

    /// Replaces the object of an image, if no other process does so meanwhile.
    fn replace(&self, key: &str, name: &str, ranges: &[PageRange]) -> Result<(), StoreError> {
        let (bytes, tag) = self.objects.get(key, INDEX_MOST + (1 << 20))?;
        let blob = || std::sync::Arc::new(MemoryBlob::new(bytes.clone(), &self.shown(name)));
        let image = match StoredImage::open_one(blob(), self.key.as_ref()) {
            Err(StoreError::NotEncrypted { .. }) => StoredImage::open_one(blob(), None)?,
            image => image?,
        };
        let (header, tail, _) = with_working_set(image, ranges)?;
        self.objects.put(key, &[header, tail].concat(), Condition::IfMatch(&tag))?;
        Ok(())
    }
}
