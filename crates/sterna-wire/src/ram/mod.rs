//! Records inside the RAM section (`specs/stream.md §2`).
//!
//! The body of each RAM section is a list of records. A record starts with a word of 64 bits. The low twelve
//! bits are [`flags`] that state its kind. The other bits are an offset in a block, or a size.
//! [`RamRecordWriter`] appends records. The decoder of the main channel reads them.

mod bare;
mod block_list;
pub mod flags;
mod writer;

pub use bare::{BareRecord, BareRecordReader};
pub use block_list::{BlockEntry, BlockList};
pub use writer::RamRecordWriter;

/// Name of the RAM section on the wire.
pub const SECTION_NAME: &str = "ram";
/// Instance of the RAM section on the wire.
pub const SECTION_INSTANCE: u32 = 0;
/// Version of the RAM section. There is no other.
pub const SECTION_VERSION: u32 = 4;
