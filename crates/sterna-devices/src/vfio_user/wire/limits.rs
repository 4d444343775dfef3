//! Limits of a message's length and descriptors.

/// Highest number of data bytes in one message: 1 MiB. The other side can state less.
pub const MAX_DATA_BYTES: u32 = 1 << 20;

/// Highest number of bytes in a message besides its data.
const MAX_HEAD_BYTES: u32 = 64;

/// Highest length of a message with at most `data_bytes` bytes of data.
pub fn message_limit(data_bytes: u32) -> u32 {
    data_bytes.saturating_add(MAX_HEAD_BYTES)
}

/// Highest number of descriptors with one message.
pub const MAX_MESSAGE_FDS: usize = 8;
