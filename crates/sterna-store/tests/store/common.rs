//! Random RAM, and images of it.

use std::path::Path;

use sterna_store::{
    Block, ImageWriter, PAGE_BYTES, Piece, Recipe, StoreError, StoredImage, WriteOptions, Written,
};

/// RAM of two blocks: pages of zeros, equal pages, text, and noise.
pub(crate) fn ram(rng: &mut fastrand::Rng) -> Vec<Vec<u8>> {
    let lengths = [rng.usize(1..70), rng.usize(1..40)];
    lengths.map(|pages| (0..pages).flat_map(|_| page(rng)).collect()).to_vec()
}

/// One page.
pub(crate) fn page(rng: &mut fastrand::Rng) -> Vec<u8> {
    match rng.u8(0..4) {
        0 => vec![0; PAGE_BYTES],
        1 => vec![0x5a; PAGE_BYTES],
        2 => (0..PAGE_BYTES).map(|at| (at / 64) as u8).collect(),
        _ => (0..PAGE_BYTES).map(|_| rng.u8(..)).collect(),
    }
}

/// Writes `ram` as an image at `path`, with a file of a head, all pages, and a tail.
pub(crate) fn write(path: &Path, ram: &[Vec<u8>], options: WriteOptions) -> Result<Written, StoreError> {
    let blocks = ram.iter().zip(["pc.ram", "pc.bios"]).map(|(bytes, name)| Block {
        name: name.to_owned(),
        length_bytes: bytes.len() as u64,
        address: None,
    });
    put(ImageWriter::create(path, blocks.collect(), options)?, ram)
}

pub(crate) fn put(writer: ImageWriter, ram: &[Vec<u8>]) -> Result<Written, StoreError> {
    let mut lane = writer.lane()?;
    let mut recipe = Recipe::default();
    recipe.push(writer.bytes(b"head"));
    for (block, bytes) in ram.iter().enumerate() {
        for (extent, content) in (0..).zip(bytes.chunks(writer.extent_bytes() as usize)) {
            lane.put(block, extent, content)?;
        }
        recipe.push(Piece::Copy { block: block as u32, offset: 0, length: bytes.len() as u64 });
        recipe.push(Piece::Hole { length: 100 });
    }
    recipe.push(writer.bytes(b"the devices"));
    drop(lane);
    writer.complete(&[("view", recipe)])
}

/// Checks that the image has exactly this RAM, and its file.
pub(crate) fn assert_has(image: &std::sync::Arc<StoredImage>, ram: &[Vec<u8>]) {
    let mut file = b"head".to_vec();
    for (block, bytes) in ram.iter().enumerate() {
        let mut read = vec![1; bytes.len()];
        image.read(block, 0, &mut read).unwrap();
        assert!(read == *bytes, "block {block} differs");
        file.extend_from_slice(bytes);
        file.extend_from_slice(&[0; 100]);
    }
    file.extend_from_slice(b"the devices");
    let reader = image.file("view").unwrap().unwrap();
    let mut read = vec![1; file.len() + 10];
    assert_eq!(reader.read_at(0, &mut read).unwrap(), file.len());
    assert!(read[..file.len()] == file, "the file differs");
    let mut part = vec![0; 5000.min(file.len() - 2)];
    assert_eq!(reader.read_at(2, &mut part).unwrap(), part.len());
    assert!(part == file[2..2 + part.len()]);
}
