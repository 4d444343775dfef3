//! Limits of a transfer, and the specification that errors name.

pub(super) const SPEC: &str = "specs/replica.md §6";

/// Most bytes that a READ or a WRITE may transfer.
pub const TRANSFER_BYTES: u32 = 32 << 20;

/// Most bytes of an option's data.
pub const OPTION_BYTES: u32 = 4096;
