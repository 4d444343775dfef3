//! Header and footer of an image in Sterna's own format: decoded ones encode to bytes that decode alike.

use sterna_store::internals::{footer, header};

/// Feeds one input to the decoders; panics if a check fails.
pub fn target(data: &[u8]) {
    let mut head = [0; 128];
    let mut foot = [0; 64];
    head[..8].copy_from_slice(b"STERNAIM");
    foot[..8].copy_from_slice(b"STERNAEN");
    let count = data.len().min(120);
    head[8..8 + count.min(112)].copy_from_slice(&data[..count.min(112)]);
    foot[8..8 + count.min(48)].copy_from_slice(&data[..count.min(48)]);
    if let Some(again) = header(&head) {
        assert_eq!(header(&again), Some(again));
    }
    let again = footer(&foot).expect("a footer with its magic and a right checksum decodes");
    assert_eq!(again[..56], foot[..56]);
}

/// First inputs: the fields of sound headers and footers, and of headers of later versions.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for image in super::store_index::samples() {
        let header = image[8..120].to_vec();
        seeds.push(image[image.len() - 56..image.len() - 8].to_vec());
        // A later version, a longer header, an unknown feature, extents of other lengths.
        for (at, value) in [(0, 2), (4, 200), (8, 7), (12, 1), (26, 0x20), (25, 0x80), (26, 0x40)] {
            let mut other = header.clone();
            other[at] = value;
            seeds.push(other);
        }
        seeds.push(header);
    }
    seeds
}
