//! Decompression. One byte chooses the format, and whether the rest is a compressed stream or bytes to compress
//! and decompress.

use std::io::{Cursor, Read, Write};

use sterna_image::Compression;
use sterna_image::compression::{Compressor, decompress};

/// Limit of decompressed bytes, because a short stream can expand to very many.
const MOST_BYTES: u64 = 256 << 10;
/// If the first byte has all of these bits, the bytes are compressed first. This is rare, because an encoder
/// takes longer than all decoders.
const COMPRESSES: u8 = 0b0011_1000;

/// Feeds one input to the decoder; panics if a check fails.
pub fn target(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else { return };
    let all: Vec<Compression> = Compression::all().collect();
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
