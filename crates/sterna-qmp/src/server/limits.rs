//! Limits of the server.

/// Maximum number of clients. Further clients are disconnected immediately.
pub const MAX_CLIENTS: usize = 32;
/// Maximum length of a command, in bytes.
pub const MAX_COMMAND_BYTES: usize = 1 << 20;
