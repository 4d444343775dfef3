//! Writes images. A file is complete or absent at its path at any time.
//!
//! Both writers start with a [`Shape`](crate::Shape) whose head is known (configuration, early sections, RAM blocks).
//! They finish with the whole shape. Therefore a receiver can start before the devices arrive. [`MappedWriter`]
//! accepts pages in any order from any thread, [`LegacyWriter`] one after another.

mod bits;
mod encode;
mod legacy;
mod libvirt;
mod mapped;
mod mapped_file;
mod mapped_lane;
mod sink;
pub(crate) mod view;
pub(crate) mod working_set;

pub use legacy::LegacyWriter;
pub(crate) use legacy::failed;
pub use libvirt::{Envelope, OUTPUT_VERSION};
pub use mapped::{MappedOptions, MappedWriter};
pub use mapped_lane::MappedLane;
pub use sink::FileSink;
