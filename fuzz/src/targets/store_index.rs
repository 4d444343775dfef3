//! The index of an image in Sterna's own format: a decoded one encodes to an index that decodes alike.

use std::sync::OnceLock;

use sterna_store::internals::{index, parts};
use sterna_store::{Block, ImageWriter, PAGE_BYTES, Piece, Recipe, StoredImage, WriteOptions};

const EXTENT: u32 = 64 << 10;

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    let bytes = match kind {
        0 => data.to_vec(),
        kind => {
            let sample = &samples()[usize::from(kind % 2)];
            let (_, mut index) = parts(sample).expect("a sample");
            overwrite(&mut index, data);
            index
        }
    };
    if let Some(again) = index(&bytes, EXTENT) {
        assert_eq!(index(&again, EXTENT), Some(again.clone()));
    }
}

/// Writes bytes over others: three bytes of the input are a place and a value.
pub(super) fn overwrite(bytes: &mut [u8], data: &[u8]) {
    for change in data.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % bytes.len().max(1);
        if let Some(byte) = bytes.get_mut(at) {
            *byte = change[2];
        }
    }
}

/// A complete image, and a layer over it.
pub(super) fn samples() -> &'static [Vec<u8>; 2] {
    static SAMPLES: OnceLock<[Vec<u8>; 2]> = OnceLock::new();
    SAMPLES.get_or_init(|| {
        let directory = std::env::temp_dir().join(format!("sterna-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let (base, layer) = (directory.join("base"), directory.join("layer"));
        write(&base, 1, WriteOptions::default());
        let options = WriteOptions {
            base: Some(StoredImage::open(&base, None).expect("a base")),
            ..Default::default()
        };
        write(&layer, 2, options);
        let images = [&base, &layer].map(|path| std::fs::read(path).expect("an image"));
        std::fs::remove_dir_all(&directory).expect("the directory");
        images
    })
}

fn write(path: &std::path::Path, fill: u8, options: WriteOptions) {
    let block = |name: &str, pages: usize| Block {
        name: name.to_owned(),
        length_bytes: (pages * PAGE_BYTES) as u64,
        address: None,
    };
    let writer = ImageWriter::create(
        path,
        vec![block("ram", 20), block("rom", 2)],
        WriteOptions { replace: true, ..options },
    )
    .expect("a writer");
    let mut lane = writer.lane().expect("a lane");
    for (block, extent, pages) in [(0, 0, 16), (0, 1, 4), (1, 0, 2)] {
        let mut content = vec![7; pages * PAGE_BYTES];
        content[PAGE_BYTES..2 * PAGE_BYTES].fill(fill);
        content[..PAGE_BYTES].fill(0);
        lane.put(block, extent, &content).expect("an extent");
    }
    drop(lane);
    let mut recipe = Recipe::default();
    recipe.push(writer.bytes(b"head"));
    recipe.push(Piece::Copy { block: 0, offset: 0, length: (20 * PAGE_BYTES) as u64 });
    recipe.push(Piece::PageRecords { block: 1, first: 0, count: 2 });
    writer.complete(&[("view", recipe)]).expect("an image");
}

/// First inputs: sound indexes, one with a working set, one with a later section, and changes of each part.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (number, sample) in samples().iter().enumerate() {
        let (_, sound) = parts(sample).expect("a sample");
        let with = |kind: u32, body: &[u8]| {
            let length = (body.len() as u64).to_le_bytes();
            [&[0][..], &sound, &kind.to_le_bytes(), &length, body].concat()
        };
        let range = [&0u32.to_le_bytes()[..], &2u32.to_le_bytes(), &3u64.to_le_bytes()].concat();
        seeds.push([&[0][..], &sound].concat());
        seeds.push(with(1 << 31 | 1, &[&[0; 32][..], &range, &range].concat()));
        seeds.push(with(1 << 31 | 99, &[1; 40]));
        seeds.push(with(99, &[1; 40]));
        let kind = if number == 0 { 2 } else { 1 };
        for at in (0..sound.len() as u16).step_by(8) {
            let [low, high] = at.to_le_bytes();
            seeds.push(vec![kind, low, high, 1]);
        }
    }
    seeds
}
