//! What QEMU's `rdma:` transport sends beside the stream (`specs/rdma.md`).
//!
//! A connection opens with private data: QEMU's eight bytes ([`ConnectRequest`], [`ConnectReply`]) and, between two
//! Sternas, an [`Introduction`]. Then each SEND is one [`Message`]: a [`Header`] and a payload. Guest memory travels in
//! none of them: the source writes it straight into the destination's memory, at the places and with the keys that
//! the messages state.
//!
//! Decoding a message checks what can be seen in it alone. [`BlockPlaces`] checks what depends on the guest's blocks:
//! indices, keys, addresses, ranges. A message is at most [`MESSAGE_BYTES`] long and is decoded where it lies; only
//! [`BlockPlaces::agreed`] allocates, one entry for each block of this side.
//!
//! [`session`] keeps the order of messages, [`Admission`] the connections of a destination. [`RegistrationPlan`] decides
//! which memory a source asks for, [`Lookahead`] when, and [`ChunkProbe`] finds how much a QEMU registers at once.

mod admission;
mod chunk;
mod header;
mod introduction;
mod lookahead;
mod message;
mod places;
mod plan;
mod private_data;
mod probe;
mod records;
pub mod session;

pub use admission::Admission;
pub use chunk::ChunkSize;
pub use header::{Header, MessageType};
pub use introduction::{Introduction, Part};
pub use lookahead::{Lookahead, Step, next_write, take_ready};
pub use message::{Message, encode_empty, encode_file, encode_records};
pub use places::{BlockPlaces, BlockRange};
pub use plan::{Batch, Destination, PlanLimits, RegistrationPlan};
pub use private_data::{ConnectReply, ConnectRequest, Registration};
pub use probe::ChunkProbe;
pub use records::{
    BlockPlace, Record, Records, RegisterRequest, RegisterResult, UnregisterRequest, ZeroRange,
};

/// Most bytes of a control message, its header included; each receive buffer of a QEMU has so many (§3.1).
pub const MESSAGE_BYTES: usize = 512 << 10;
/// Most bytes of its payload.
pub const PAYLOAD_BYTES: usize = MESSAGE_BYTES - Header::BYTES;
/// Most bytes of stream that QEMU puts into one FILE message (§5.1). It takes up to [`PAYLOAD_BYTES`].
pub const QEMU_FILE_BYTES: usize = 32 << 10;
/// Most commands in one message (§3.1).
pub const MOST_REPEATED: u32 = 4096;
