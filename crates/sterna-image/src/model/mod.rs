//! What an image is, without its pages: [`Shape`] is the machine, [`ImageKind`] how it is wrapped.

mod beside;
mod convert;
mod kind;
mod shape;

pub use beside::Beside;
pub use kind::{ByteOrder, Compression, Container, Form, ImageKind, LibvirtHeader};
pub(crate) use shape::IGNORE_SHARED;
pub use shape::{BlockShape, RamShape, Shape};

/// Most bytes of opaque state (`early`, `between`, `devices`, description) that are kept in memory.
pub const OPAQUE_BYTES: usize = 256 << 20;
