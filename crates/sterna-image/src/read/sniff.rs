//! What a file is, by its first bytes.

use sterna_wire::libvirt::{MAGIC_COMPLETE, MAGIC_PARTIAL};
use sterna_wire::main::FileHeader;

use crate::model::Compression;

/// Bytes that [`sniff`] wants to see.
pub(super) const BYTES: usize = 16;

/// What the first bytes say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sniffed {
    /// libvirt's container.
    Libvirt,
    /// A stream, compressed or not.
    Stream(Compression),
}

/// Compressors and how their output starts (`specs/libvirt-save.md §2`).
const MAGICS: [(Compression, &[u8]); 5] = [
    (Compression::Gzip, b"\x1f\x8b"),
    (Compression::Bzip2, b"BZh"),
    (Compression::Xz, b"\xfd7zXZ\0"),
    (Compression::Lzop, b"\x89LZO"),
    (Compression::Zstd, b"\x28\xb5\x2f\xfd"),
];

/// Tells; `None`: no image.
pub(super) fn sniff(bytes: &[u8]) -> Option<Sniffed> {
    if bytes.starts_with(&MAGIC_COMPLETE) || bytes.starts_with(&MAGIC_PARTIAL) {
        return Some(Sniffed::Libvirt);
    }
    if bytes.starts_with(&FileHeader::MAGIC) {
        return Some(Sniffed::Stream(Compression::None));
    }
    let found = MAGICS.iter().find(|(_, magic)| bytes.starts_with(magic));
    found.map(|(compression, _)| Sniffed::Stream(*compression))
}

/// The compressor that a libvirt format word means; `None` for `sparse`, which is no compression but a form.
pub(crate) fn compression_of(format: u32) -> Option<Compression> {
    Some(match format {
        0 => Compression::None,
        1 => Compression::Gzip,
        2 => Compression::Bzip2,
        3 => Compression::Xz,
        4 => Compression::Lzop,
        5 => Compression::Zstd,
        _ => return None,
    })
}
