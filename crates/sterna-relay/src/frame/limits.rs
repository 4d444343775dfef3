//! The limits of the fields (`specs/relay.md`).

/// Version of the protocol.
pub const VERSION: u32 = 1;
/// Most bytes of payload in one DATA frame.
pub const DATA_BYTES: usize = 256 << 10;
/// Most carriers of a session.
pub const LANES: u8 = 16;
/// Most bytes of the text in OVER.
pub const TEXT_BYTES: usize = 1024;
/// Offsets in a flow are below this number.
pub const OFFSETS: u64 = 1 << 62;
