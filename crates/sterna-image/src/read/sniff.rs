//! What a file is, by its first bytes.

use sterna_wire::libvirt::{MAGIC_COMPLETE, MAGIC_PARTIAL};
use sterna_wire::main::FileHeader;

use crate::model::Packing;

/// Bytes that [`sniff`] wants to see.
pub(super) const BYTES: usize = 16;

/// What the first bytes say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sniffed {
    /// libvirt's container.
    Libvirt,
    /// A stream, packed or not.
    Stream(Packing),
}

/// Compressors and how their output starts (`specs/libvirt-save.md §2`).
const MAGICS: [(Packing, &[u8]); 5] = [
    (Packing::Gzip, b"\x1f\x8b"),
    (Packing::Bzip2, b"BZh"),
    (Packing::Xz, b"\xfd7zXZ\0"),
    (Packing::Lzop, b"\x89LZO"),
    (Packing::Zstd, b"\x28\xb5\x2f\xfd"),
];

/// Tells; `None`: no image.
pub(super) fn sniff(bytes: &[u8]) -> Option<Sniffed> {
    if bytes.starts_with(&MAGIC_COMPLETE) || bytes.starts_with(&MAGIC_PARTIAL) {
        return Some(Sniffed::Libvirt);
    }
    if bytes.starts_with(&FileHeader::MAGIC) {
        return Some(Sniffed::Stream(Packing::None));
    }
    let found = MAGICS.iter().find(|(_, magic)| bytes.starts_with(magic));
    found.map(|(packing, _)| Sniffed::Stream(*packing))
}

/// The compressor that a libvirt format word means; `None` for `sparse`, which is no packing but a form.
pub(crate) fn packing_of(format: u32) -> Option<Packing> {
    Some(match format {
        0 => Packing::None,
        1 => Packing::Gzip,
        2 => Packing::Bzip2,
        3 => Packing::Xz,
        4 => Packing::Lzop,
        5 => Packing::Zstd,
        _ => return None,
    })
}
