//! The alignment of direct I/O.

/// Alignment in bytes of offsets, lengths and addresses of direct I/O. File systems need 512 or 4096.
pub const DIRECT_ALIGN: u64 = 4096;
