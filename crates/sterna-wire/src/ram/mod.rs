//! Records inside the RAM section (`specs/stream.md §2`).
//!
//! The body of each RAM section is a list of records. A record starts with a word of 64 bits. The low twelve
//! bits are [`flags`] that state its kind. The other bits are an offset in a block, or a size.
//! [`RamRecordWriter`] appends records. The decoder of the main channel reads them.

mod bare;
mod block_list;
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

/// The low bits of a record's word (§2.1).
pub mod flags {
    /// The page contains only zeros.
    pub const ZERO: u64 = 0x002;
    /// The record is the block list.
    pub const MEM_SIZE: u64 = 0x004;
    /// The record is a page with its full content.
    pub const PAGE: u64 = 0x008;
    /// The section's list of records ends here.
    pub const EOS: u64 = 0x010;
    /// The page is in the same block as the previous one, and no name follows.
    pub const CONTINUE: u64 = 0x020;
    /// The record is a page as a difference to its older content.
    pub const XBZRLE: u64 = 0x040;
    /// A phase of RDMA begins (`specs/rdma.md §5.2`). Refused with any other transport.
    pub const HOOK: u64 = 0x080;
    /// A synchronisation point for all multifd channels.
    pub const MULTIFD_FLUSH: u64 = 0x200;
    /// Mask of all flag bits of the word.
    pub const MASK: u64 = crate::PAGE_SIZE as u64 - 1;
}
