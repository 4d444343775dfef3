//! What the server takes at most.

/// The most clients at a time; more are refused at once.
pub const MAX_CLIENTS: usize = 32;
/// The longest command in bytes.
pub const MAX_COMMAND_BYTES: usize = 1 << 20;
