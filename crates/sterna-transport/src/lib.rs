//! Channels: how bytes move, without knowing what they mean.
//!
//! # The model
//! A [`Channel`] is one connected stream socket, TCP or Unix (or a [`ByteStream`] in its place), blocking, usable from several threads (one
//! reads, one writes, any shuts it down). Every blocked call ends: when bytes moved, when the peer closed or
//! reset, when nothing moved for the stall limit, or when another thread called [`Channel::shutdown`]. The
//! error's type says which; the error names the channel and the byte.
//!
//! Guest RAM is sent and received without copying it in user space: [`Channel::read_into_ram`] and [`IoPart::Ram`] hand
//! [`sterna_ram::RamSlice`]s to the kernel.
//!
//! A [`CancelFlag`] ends waits that have no socket to shut down yet (connecting, accepting).
//!
//! A [`Listener`] accepts channels; a [`PageFile`] is a file for pages, complete or absent, with direct I/O. [`rdma`] has
//! what the engine uses of RDMA adapters.
#![warn(unreachable_pub)]

mod address;
mod cancel;
mod channel;
mod connect;
mod error;
mod file;
mod flusher;
mod group;
mod handed;
mod listener;
mod parts;
pub mod rdma;
mod socket;
mod stream;
mod tls;

pub use address::Address;
pub use cancel::CancelFlag;
pub use channel::{Channel, Delivery, PeerCredentials, Piece};
pub use connect::resolve;
pub use error::{Direction, TransportError};
pub use file::{
    CreateOptions, DIRECT_ALIGN, Direct, OpenOptions, PageFile, PageQueue, QueueOptions, RangeReader,
};
pub use flusher::Flusher;
pub use group::{ChannelGroup, SilenceWatch};
pub use handed::HandedFd;
pub use listener::Listener;
pub use parts::IoPart;
pub use stream::{ByteStream, StreamError};
pub use tls::{
    Authorization, AuthorizationRule, CredentialsError, Tls, TlsCredentials, TlsEndpoint, TlsFault, TlsFiles,
    TlsProblem,
};
