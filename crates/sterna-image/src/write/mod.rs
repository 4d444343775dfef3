//! Writing images: complete or absent, whatever happens.
//!
//! Both writers are begun with a [`Shape`](crate::Shape) whose head is known (configuration, early sections, RAM
//! blocks) and finished with the whole one, so that a receiver may begin before the devices came. [`MappedWriter`]
//! takes pages in any order from any thread, [`LegacyWriter`] takes them one behind the other.

mod bits;
mod encode;
mod legacy;
mod libvirt;
mod mapped;
mod mapped_lane;
mod sink;

pub use legacy::LegacyWriter;
pub(crate) use legacy::failed;
pub use libvirt::{Envelope, OUTPUT_VERSION};
pub use mapped::{MappedOptions, MappedWriter};
pub use mapped_lane::MappedLane;
pub use sink::FileSink;
