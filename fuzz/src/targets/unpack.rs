//! Unpackers: one byte chooses the format; then a packed stream, and the same bytes packed and unpacked.

use std::io::{Cursor, Read, Write};

use sterna_image::Packing;
use sterna_image::pack::{Packer, unpack};

/// What is unpacked at most: a few bytes can become very many.
const MOST_BYTES: u64 = 8 << 20;

/// Takes one input.
pub fn target(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else { return };
    let all = [Packing::Gzip, Packing::Bzip2, Packing::Xz, Packing::Lzop, Packing::Zstd];
    let packing = all[usize::from(*choice) % all.len()];
    let mut out = Vec::new();
    let _ = unpack(packing, Cursor::new(data.to_vec())).unwrap().take(MOST_BYTES).read_to_end(&mut out);

    let mut packer = Packer::new(Vec::new(), packing, 1).unwrap();
    packer.write_all(data).unwrap();
    let packed = packer.finish().unwrap();
    let mut again = Vec::new();
    unpack(packing, Cursor::new(packed)).unwrap().read_to_end(&mut again).unwrap();
    assert!(again == data);
}
