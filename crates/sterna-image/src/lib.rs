//! Images of virtual machines: QEMU's legacy stream and mapped-ram, bare, compressed, or in libvirt's container.
//!
//! # The model
//! An image is a machine's migration stream in a file. [`Shape`] is the stream without its pages. It contains the
//! configuration and the RAM blocks, which Sterna understands, and the devices, which Sterna keeps byte for byte.
//! [`Format`] describes the storage of the stream: container, compression, and [`Form`] (where the pages are).
//!
//! | module | contains |
//! | --- | --- |
//! | `format` | [`Format`]: the table of all formats |
//! | [`model`] | [`Shape`], [`LibvirtHeader`] |
//! | [`read`] | [`Image`]: detects the format, checks the image, reads pages at random or in stream order |
//! | [`compression`] | gzip, bzip2, xz, lzop, zstd |
//! | [`convert`] | conversion of any format to any other |
//! | [`mod@write`] | [`MappedWriter`], [`LegacyWriter`], libvirt's container |
//! | [`tools`] | verify, inspect, extract, diff, repair |
//!
//! Paragraph numbers in docs and errors refer to `specs/mapped-ram.md` and `specs/libvirt-save.md`.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

pub mod compression;
pub mod convert;
mod crew;
mod error;
mod format;
pub mod model;
pub mod read;
pub mod tools;
pub mod write;

pub use error::ImageError;
pub use format::{Compression, Form, Format};
pub use model::{BlockShape, ByteOrder, LibvirtHeader, OPAQUE_BYTES, RamShape, Shape};
pub use read::open::open_frames;
pub use read::visitor::PageVisitor;
pub use read::{Access, Image, MappedBlock, MappedPages, PagePlaces, Preview, ReadAt, Stamp, open_stored};
pub use sterna_store::{
    Collected, ImageStore, Key, NamedImage, PageRange, Place as ImagePlace, StoreError, StoreStat,
    StoredImage, publish,
};
pub use sterna_transport::{CreateOptions, Direct};
pub use write::working_set::store_working_set;
pub use write::{Envelope, FileSink, LegacyWriter, MappedLane, MappedOptions, MappedWriter};

/// Compiles the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
