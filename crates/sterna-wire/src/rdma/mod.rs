//! Messages of QEMU's `rdma:` transport, in addition to the stream (`specs/rdma.md`).
//!
//! A connection starts with private data: QEMU's eight bytes ([`ConnectRequest`], [`ConnectReply`]) and,
//! between two Sternas, an [`Introduction`]. Then each SEND is one [`Message`]: a [`Header`] and a payload. No
//! message contains guest memory. The source writes memory directly into the destination's memory, at the
//! addresses and with the keys in the messages.
//!
//! Decoding a message checks the rules that concern only that message. [`BlockPlaces`] checks the rules that
//! depend on the guest's blocks: indices, keys, addresses, ranges. A message is at most [`MESSAGE_BYTES`] long
//! and is decoded in place. Only [`BlockPlaces::agreed`] allocates, one entry for each block of this side.
//!
//! - [`session`] enforces the order of messages.
//! - [`Admission`] assigns the connections of a destination.
//! - [`RegistrationPlan`] decides which memory a source requests, and [`Lookahead`] when.
//! - [`ChunkProbe`] finds out how much memory a QEMU registers per request.

mod admission;
mod chunk;
mod header;
mod introduction;
mod limits;
mod lookahead;
mod message;
mod message_type;
mod places;
mod plan;
mod private_data;
mod probe;
mod records;
pub mod session;

pub use admission::Admission;
pub use chunk::ChunkSize;
pub use header::Header;
pub use introduction::{Introduction, Part};
pub use limits::{MESSAGE_BYTES, MOST_REPEATED, PAYLOAD_BYTES, QEMU_FILE_BYTES};
pub use lookahead::{Lookahead, Step, next_write, take_ready};
pub use message::{Message, encode_empty, encode_file, encode_records};
pub use message_type::MessageType;
pub use places::{BlockPlaces, BlockRange};
pub use plan::{Batch, Destination, PlanLimits, RegistrationPlan};
pub use private_data::{ConnectReply, ConnectRequest, Registration};
pub use probe::ChunkProbe;
pub use records::{
    BlockPlace, Record, Records, RegisterRequest, RegisterResult, UnregisterRequest, ZeroRange,
};
