//! An image's data without its pages.
//!
//! [`Shape`] is the machine, and [`LibvirtHeader`] is the start of libvirt's container.

mod beside;
mod convert;
mod domain;
mod libvirt_header;
mod shape;

pub use beside::Beside;
pub use domain::{Domain, DomainMachine, holds_memory};
pub use libvirt_header::{ByteOrder, LibvirtHeader};
pub use shape::{BlockShape, RamShape, Shape};
pub(crate) use shape::{IGNORE_SHARED, MAPPED_RAM};

/// The limit of opaque state (`early`, `between`, `devices`, description) in memory: 256 MiB.
pub const OPAQUE_BYTES: usize = 256 << 20;
