//! Packing and unpacking streams: gzip, bzip2, xz, lzop, zstd, as the programs that libvirt runs do it
//! (`specs/libvirt-save.md §2`).
//!
//! All five formats may be written in independent pieces, one behind the other, and their programs unpack such a
//! file like any other. So a [`Packer`] cuts the stream into pieces and packs several at once. Unpacking has no
//! such seams; it runs in a thread of its own, ahead of the reader.

mod lzo;
mod lzop;
mod packer;
mod unpacker;
mod zstd_frames;

pub use packer::Packer;
pub use unpacker::unpack;
pub(crate) use unpacker::{Damaged, Places, unpack_with};
