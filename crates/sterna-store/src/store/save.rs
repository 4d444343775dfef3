//! Starts new images in a store, which share frames with images that are there already.

use std::collections::HashMap;
use std::sync::Arc;

use super::image_store::{ImageStore, NAME_OBJECT_MOST};
use super::keys::{IMAGES, pack_key};
use super::lease::Lease;
use super::packs::PackSink;
use crate::error::StoreError;
use crate::image_name::check_name;
use crate::layout::{Block, FrameEntry, features};
use crate::write::{ImageWriter, WriteOptions};

/// Bytes of other images' indexes that a save reads to find frames that are there already.
const KNOWN_BYTES: u64 = 256 << 20;

/// Frames that are in the store, and the packs that have them.
#[derive(Default)]
struct Known {
    ids: Vec<[u8; 16]>,
    frames: Vec<FrameEntry>,
}

impl ImageStore {
    /// Starts an image with the name `name`. Frames that other images have are not stored again.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] if the name exists and may not be replaced; the errors of [`ImageWriter::create`].
    pub fn writer(
        &self,
        name: &str,
        blocks: Vec<Block>,
        options: WriteOptions,
    ) -> Result<ImageWriter, StoreError> {
        check_name(name)?;
        let store = Self { objects: Arc::clone(&self.objects), key: options.key.clone() };
        let key = store.name_key(name);
        if !options.replace && store.objects.get(&key, NAME_OBJECT_MOST).is_ok() {
            return Err(StoreError::Conflict { name: self.shown(name) });
        }
        let lease = Lease::take(&store)?;
        if let Some(base) = &options.base {
            let base_key = format!("{IMAGES}{}", base.digest());
            if lease.condemned.contains(&base_key) || store.objects.open(&base_key).is_err() {
                let text = format!(
                    "the base {} of {} is not in the store: convert it into the store first, or leave --base out",
                    base.name(),
                    self.shown(name)
                );
                return Err(StoreError::Request(text));
            }
        }
        let known = store.known_frames(&lease, options.extent_bytes)?;
        let (ids, frames) = (known.ids, known.frames);
        let sink = PackSink::new(&store, name, lease, ids, options.replace);
        let writer =
            ImageWriter::with_sink(Box::new(sink), blocks, options, name.to_owned(), features::PACKS)?;
        writer.preload(frames);
        Ok(writer)
    }

    /// Frames of the newest images that a new image may name, too.
    fn known_frames(&self, lease: &Lease, extent_bytes: u32) -> Result<Known, StoreError> {
        let mut images = Vec::new();
        self.objects.list(IMAGES, &mut |listed| {
            images.push(listed);
            Ok(())
        })?;
        images.sort_by_key(|listed| std::cmp::Reverse(listed.modified));
        let (mut known, mut bytes, mut numbers) = (Known::default(), 0, HashMap::new());
        for listed in images {
            bytes += listed.length_bytes;
            if bytes > KNOWN_BYTES {
                break;
            }
            let Ok(digest) = listed.key[IMAGES.len()..].parse() else { continue };
            if lease.condemned.contains(&listed.key) {
                continue;
            }
            // An image with another key, or a damaged one, shares nothing.
            let Ok(image) = self.open_one(&digest, "") else { continue };
            if image.extent_bytes() != extent_bytes || image.is_encrypted() != self.key.is_some() {
                continue;
            }
            for frame in &image.index().frames {
                let id = image.index().packs[frame.pack as usize];
                if lease.condemned.contains(&pack_key(&id)) {
                    continue;
                }
                let next = known.ids.len() as u32;
                let number = *numbers.entry(id).or_insert(next);
                if number == next {
                    known.ids.push(id);
                }
                known.frames.push(FrameEntry { pack: number, ..*frame });
            }
        }
        Ok(known)
    }
}
