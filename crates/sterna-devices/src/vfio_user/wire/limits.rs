//! How long a message may be.

/// The most data bytes that one message carries, if the other side does not say less: 1 MiB.
pub const MAX_DATA_BYTES: u32 = 1 << 20;

/// What a message has beside its data at most.
const MAX_HEAD_BYTES: u32 = 64;

/// The most bytes of a message with at most so many data bytes.
pub fn message_limit(data_bytes: u32) -> u32 {
    data_bytes.saturating_add(MAX_HEAD_BYTES)
}

/// The most descriptors that come with one message.
pub const MAX_MESSAGE_FDS: usize = 8;
