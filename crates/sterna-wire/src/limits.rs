//! Limits on the memory that a peer can make this side allocate (`specs/stream.md §9`).
//!
//! QEMU allocates as much as the wire states. This crate checks each length, count and index first, against one
//! of these limits or against the known properties of the guest.

use crate::PAGE_SIZE;

/// Longest machine type name, in bytes.
pub const MACHINE_TYPE_BYTES: usize = 255;
/// Most capability names in the configuration.
pub const CAPABILITIES: usize = 64;
/// Most bytes of a name with a one-byte length.
pub const NAME_BYTES: usize = 255;
/// Most RAM blocks in a block list.
pub const BLOCKS: usize = 4096;
/// Most sections (START and FULL) in one stream.
pub const SECTIONS: usize = 65_536;
/// Most bytes of device bodies that one stream may make a receiver store.
pub const DEVICE_STATE_BYTES: u64 = 1 << 30;
/// Most bytes of the JSON after the stream.
pub const VM_DESCRIPTION_BYTES: usize = 16 << 20;
/// Most values in that JSON.
///
/// A parsed value takes up to some 100 bytes, however short its text. The parser itself refuses nesting deeper
/// than 127.
pub const VM_DESCRIPTION_VALUES: usize = 1 << 20;
/// Most bytes of an embedded stream (PACKAGED).
pub const PACKAGE_BYTES: u32 = 256 << 20;
/// Most bytes of a return-path message's payload.
pub const RETURN_MESSAGE_BYTES: usize = 512;
/// Most bytes of a compressed multifd payload. QEMU reserves the same number.
pub const COMPRESSED_PAYLOAD_BYTES: usize = 1 << 20;
/// Most pages in one multifd packet (`N`).
pub const PACKET_PAGES: usize = 524_288 / PAGE_SIZE;
/// Most bytes of a device-state packet's payload.
pub const DEVICE_STATE_PACKET_BYTES: u32 = 128 << 20;
/// Largest zstd window, as log2 of bytes, that a receiver must accept.
pub const ZSTD_WINDOW_LOG: u32 = 27;
/// Bytes of the main channel that the decoder's caller must be able to buffer.
///
/// [`Step::NeedMore`](crate::main::Step::NeedMore) of [`MainDecoder::next`](crate::main::MainDecoder::next)
/// never asks for more.
pub const MAIN_STEP_BYTES: usize = 32 << 10;
/// Most bytes of the configuration from which a destination makes its VM.
pub const CONFIGURATION_BYTES: usize = 1 << 20;
/// Most bytes of a compatibility record.
pub const COMPATIBILITY_BYTES: usize = 4 << 20;
