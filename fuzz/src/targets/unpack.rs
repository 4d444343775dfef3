//! Unpackers: one byte chooses the format; then a packed stream, or, by the same byte, bytes that are packed and unpacked.

use std::io::{Cursor, Read, Write};

use sterna_image::Packing;
use sterna_image::pack::{Packer, unpack};

/// What is unpacked at most: a few bytes can become very many.
const MOST_BYTES: u64 = 256 << 10;
/// If all of these bits of the first byte are set the bytes are packed first: an encoder takes longer than all decoders.
const PACKS: u8 = 0b0011_1000;

/// Takes one input.
pub fn target(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else { return };
    let all = [Packing::Gzip, Packing::Bzip2, Packing::Xz, Packing::Lzop, Packing::Zstd];
    let packing = all[usize::from(*choice & 7) % all.len()];
    if choice & PACKS != PACKS {
        let mut out = Vec::new();
        let _ = unpack(packing, Cursor::new(data.to_vec())).unwrap().take(MOST_BYTES).read_to_end(&mut out);
        return;
    }
    let mut packer = Packer::new(Vec::new(), packing, 1);
    packer.write_all(data).unwrap();
    let packed = packer.finish().unwrap();
    let mut again = Vec::new();
    unpack(packing, Cursor::new(packed)).unwrap().read_to_end(&mut again).unwrap();
    assert!(again == data);
}
