//! The low bits of a record's word (`specs/stream.md §2.1`).

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
