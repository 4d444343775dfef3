//! NBD, as a standby serves it for a guest's disks (`specs/replica.md §6`): the fixed newstyle handshake and simple replies.
//!
//! [`DiskHello`] opens the connection at the standby's address. The server then says [`GREETING`], the client its flags
//! ([`client_flags`]), and [`ClientOption`]s until one begins the transmission: then [`Request`]s come, and each gets a [`reply`]. A READ's
//! data follow its reply, a WRITE's data its request.

mod handshake;
mod request;

pub use handshake::{
    ClientOption, DiskHello, Export, GREETING, OptionReply, ZEROES_BYTES, client_flags, export_name_reply,
    option_reply,
};
pub use request::{CommandKind, Request, reply};

const SPEC: &str = "specs/replica.md §6";

/// Most bytes that a READ or a WRITE may move.
pub const TRANSFER_BYTES: u32 = 32 << 20;
/// Most bytes of an option's data.
pub const OPTION_BYTES: u32 = 4096;
