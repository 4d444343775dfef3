//! The window of compression, which both ends of a carrier must agree on.

/// The window of a carrier's zstd stream, as a power of two: at most 4 MiB of memory for each end of a carrier.
pub const WINDOW_LOG: u32 = 21;
