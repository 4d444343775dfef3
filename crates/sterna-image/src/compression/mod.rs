//! Compression of streams with gzip, bzip2, xz, lzop and zstd.
//!
//! The output is compatible with the programs that libvirt runs (`specs/libvirt-save.md §2`).
//!
//! All five formats allow independent pieces, one after another, and their programs decompress such a file like any
//! other. Therefore a [`Compressor`] cuts the stream into pieces and compresses several in parallel. A decompressor
//! cannot find the borders of pieces. It runs in a single separate thread, ahead of the reader.

mod compressor;
mod decompressor;
mod lzo;
mod lzop;
mod zstd_frames;

pub use compressor::Compressor;
pub use decompressor::decompress;
pub(crate) use decompressor::{Damaged, Places, decompress_with};
