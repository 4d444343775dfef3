//! The limits of the fields (`specs/relay.md`).

/// Newest version of the protocol: the hello offers compression.
pub const VERSION: u32 = 2;
/// Oldest version of the protocol that this side speaks.
pub const OLDEST_VERSION: u32 = 1;
/// Bytes of a frame before its body: length and kind.
pub(super) const HEAD_BYTES: usize = 8;
/// Most bytes of payload in one DATA frame.
pub const DATA_BYTES: usize = 256 << 10;
/// Most carriers of a session.
pub const LANES: u8 = 16;
/// Most bytes of the text in OVER.
pub const TEXT_BYTES: usize = 1024;
/// Offsets in a flow are below this number.
pub const OFFSETS: u64 = 1 << 62;
/// Bytes of a page to which PACKED frames refer.
pub const PAGE_BYTES: usize = 4096;
/// Most pages that one PACKED frame names.
pub const PACKED_PAGES: usize = DATA_BYTES / PAGE_BYTES;
/// Most bytes of payload in one PACKED frame: the names of its pages, and bytes that compression made larger.
pub const PACKED_BYTES: usize = DATA_BYTES + 4096 + PACKED_PAGES * 36;
/// Most hashes in one HAVE frame.
pub const HAVE_HASHES: usize = 500;
