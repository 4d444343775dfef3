//! Compressing and decompressing streams: gzip, bzip2, xz, lzop, zstd, as the programs that libvirt runs do it
//! (`specs/libvirt-save.md §2`).
//!
//! All five formats may be written in independent pieces, one after the other, and their programs decompress such a
//! file like any other. So a [`Compressor`] cuts the stream into pieces and compresses several at once. Decompressing has no
//! such seams; it runs in a thread of its own, ahead of the reader.

mod compressor;
mod decompressor;
mod lzo;
mod lzop;
mod zstd_frames;

pub use compressor::Compressor;
pub use decompressor::decompress;
pub(crate) use decompressor::{Damaged, Places, decompress_with};
