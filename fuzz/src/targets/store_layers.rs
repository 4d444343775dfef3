//! A layer and its base, whose indexes are changed: every read gives bytes or an error.

use std::sync::Arc;

use sterna_store::internals::{image, parts};
use sterna_store::{Bases, Blob, Digest, MemoryBlob, PAGE_BYTES, StoreError, StoredImage};

use super::store_index::{overwrite, samples};

const EXTENT: u32 = 64 << 10;

/// Whatever digest a layer names, its base is this image.
struct One(Vec<u8>);

impl Bases for One {
    fn find(&self, _: &Digest, _: &str) -> Result<Option<Arc<dyn Blob>>, StoreError> {
        Ok(Some(Arc::new(MemoryBlob::new(self.0.clone(), "base"))))
    }
}

/// Feeds one input to the reader; panics if a check fails.
pub fn target(data: &[u8]) {
    let (upper, lower) = data.split_at(data.len() / 2);
    let [base, layer] = samples();
    let (frames, mut index) = parts(base).expect("a sample");
    overwrite(&mut index, lower);
    let base = image(&frames, &index, EXTENT, false);
    let (frames, mut index) = parts(layer).expect("a sample");
    overwrite(&mut index, upper);
    for is_layer in [false, true] {
        let layer = MemoryBlob::new(image(&frames, &index, EXTENT, is_layer), "layer");
        if let Ok(opened) = StoredImage::open_blob(Arc::new(layer), None, &One(base.clone())) {
            read(&opened);
        }
    }
}

fn read(image: &Arc<StoredImage>) {
    let mut page = [0; PAGE_BYTES];
    for (block, place) in image.blocks().iter().enumerate() {
        for number in 0..place.pages().min(64) {
            let start = number * PAGE_BYTES as u64;
            let length = (place.length_bytes - start).min(PAGE_BYTES as u64) as usize;
            let _ = image.read(block, start, &mut page[..length]);
        }
    }
    for file in image.files() {
        if let Ok(Some(reader)) = image.file(&file.name) {
            let _ = reader.read_at(reader.len_bytes() / 2, &mut page);
        }
    }
    let _ = image.check(1);
}

/// First inputs: no change, and a change at each part of either index.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![Vec::new()];
    for at in (0u16..600).step_by(12) {
        let [low, high] = at.to_le_bytes();
        for value in [0, 1, 0xff] {
            seeds.push(vec![low, high, value, 0, 0, 1]);
        }
        seeds.push(vec![0, 0, 1, low, high, 1]);
    }
    seeds
}
