//! The NBD protocol as a standby serves it for a guest's disks (`specs/replica.md §6`).
//!
//! It has the fixed newstyle handshake and simple replies. The messages of a connection are, in order:
//!
//! 1. [`DiskHello`] opens the connection at the standby's address.
//! 2. The server sends [`GREETING`], the client its flags ([`client_flags`]).
//! 3. The client sends [`ClientOption`]s until one starts transmission.
//! 4. The client sends [`Request`]s, and the server answers each with a [`reply`].
//!
//! A READ's data follow the reply, a WRITE's data the request.

mod handshake;
mod limits;
mod request;

pub use handshake::{
    ClientOption, DiskHello, Export, GREETING, OptionReply, ZEROES_BYTES, client_flags, export_name_reply,
    option_reply,
};
pub use limits::{OPTION_BYTES, TRANSFER_BYTES};
pub use request::{CommandKind, Request, reply};
