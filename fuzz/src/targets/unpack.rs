//! Unpackers: one byte chooses the format; then a compressed stream, or, by the same byte, bytes that are compressed and decompressed.

use std::io::{Cursor, Read, Write};

use sterna_image::Compression;
use sterna_image::compression::{Compressor, decompress};

/// What is decompressed at most: a few bytes can become very many.
const MOST_BYTES: u64 = 256 << 10;
/// If all of these bits of the first byte are set the bytes are compressed first: an encoder takes longer than all decoders.
const COMPRESSES: u8 = 0b0011_1000;

/// Takes one input.
pub fn target(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else { return };
    let all = [Compression::Gzip, Compression::Bzip2, Compression::Xz, Compression::Lzop, Compression::Zstd];
    let compression = all[usize::from(*choice & 7) % all.len()];
    if choice & COMPRESSES != COMPRESSES {
        let mut out = Vec::new();
        let _ = decompress(compression, Cursor::new(data.to_vec()))
            .unwrap()
            .take(MOST_BYTES)
            .read_to_end(&mut out);
        return;
    }
    let mut compressor = Compressor::new(Vec::new(), compression, 1);
    compressor.write_all(data).unwrap();
    let compressed = compressor.finish().unwrap();
    let mut again = Vec::new();
    decompress(compression, Cursor::new(compressed)).unwrap().read_to_end(&mut again).unwrap();
    assert!(again == data);
}
