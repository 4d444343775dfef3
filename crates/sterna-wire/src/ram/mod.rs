//! Records inside the RAM section (`specs/stream.md §2`).
//!
//! The body of each RAM section is a list of records. A record starts with a word of 64 bits: the low twelve say
//! what it is ([`flags`]), the rest is an offset in a block, or a size. [`RamRecordWriter`] appends them; the
//! decoder of the main channel reads them.

mod bare;
mod block_list;
mod writer;

pub use bare::{BareRecord, BareRecordReader};
pub use block_list::{BlockEntry, BlockList};
pub use writer::RamRecordWriter;

/// Name of the RAM section.
pub const SECTION_NAME: &str = "ram";
/// Its instance.
pub const SECTION_INSTANCE: u32 = 0;
/// Its version; there is no other.
pub const SECTION_VERSION: u32 = 4;

/// The low bits of a record's word (§2.1).
pub mod flags {
    /// The page is all zero.
    pub const ZERO: u64 = 0x002;
    /// The block list.
    pub const MEM_SIZE: u64 = 0x004;
    /// A page as it is.
    pub const PAGE: u64 = 0x008;
    /// End of the section's list.
    pub const EOS: u64 = 0x010;
    /// The page is in the same block as the one before; no name follows.
    pub const CONTINUE: u64 = 0x020;
    /// A page as a difference.
    pub const XBZRLE: u64 = 0x040;
    /// A phase of RDMA begins (`specs/rdma.md §5.2`); refused over any other transport.
    pub const HOOK: u64 = 0x080;
    /// All multifd channels have to be in step.
    pub const MULTIFD_FLUSH: u64 = 0x200;
    /// All bits of the word that are flags.
    pub const MASK: u64 = crate::PAGE_SIZE as u64 - 1;
}
