//! Limits of a control message.

/// Most bytes of a control message with its header (§3.1).
///
/// Each receive buffer of a QEMU has this size.
pub const MESSAGE_BYTES: usize = 512 << 10;

/// Length of a message's header on the wire, in bytes (§3.1).
pub(super) const HEADER_BYTES: usize = 16;
/// Most bytes of a control message's payload.
pub const PAYLOAD_BYTES: usize = MESSAGE_BYTES - HEADER_BYTES;

/// Most bytes of stream that QEMU sends in one FILE message (§5.1).
///
/// QEMU accepts up to [`PAYLOAD_BYTES`].
pub const QEMU_FILE_BYTES: usize = 32 << 10;

/// Most commands in one message (§3.1).
pub const MOST_REPEATED: u32 = 4096;
