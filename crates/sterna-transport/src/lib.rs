//! Transports of a migration: sockets, TLS, RDMA and page files. They move bytes and do not interpret them.
//!
//! # The model
//! A [`Channel`] is one connected stream socket (TCP or Unix), or a [`ByteStream`] in its place. Calls block.
//! Several threads may use a channel: one reads, one writes, and any thread may shut it down. A blocked call
//! always returns, for one of four reasons:
//! * bytes moved;
//! * the peer closed or reset the connection;
//! * no byte moved for the stall limit;
//! * another thread called [`Channel::shutdown`].
//!
//! The type of the error identifies the reason; the error names the channel and the byte offset.
//!
//! Guest RAM is sent and received without a copy in user space: [`Channel::read_into_ram`] and [`IoPart::Ram`]
//! pass [`sterna_ram::RamSlice`]s to the kernel.
//!
//! A [`CancelFlag`] ends waits that have no socket to shut down yet (connecting, accepting).
//!
//! A [`Listener`] accepts channels. A [`PageFile`] is a file for pages with direct I/O; it appears at its path
//! complete or not at all. The module `rdma` (feature `rdma`) contains the operations of RDMA adapters that the
//! engine uses.
#![warn(unreachable_pub)]

mod address;
mod cancel;
mod channel;
mod connect;
mod delivery;
mod error;
mod file;
mod flusher;
mod group;
mod handed;
mod listener;
mod parts;
#[cfg(feature = "rdma")]
pub mod rdma;
mod shortage;
mod socket;
mod socket_names;
mod stream;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "tls/off.rs"]
mod tls;
mod unix_path;

pub use address::Address;
pub use cancel::CancelFlag;
pub use channel::Channel;
pub use channel::descriptors::PeerCredentials;
pub use channel::piece::Piece;
pub use connect::{connect_socket, is_abandoned, resolve};
pub use delivery::Delivery;
pub use error::{DescriptorProblem, Direction, TransportError};
pub use file::{
    CreateOptions, DIRECT_ALIGN, Direct, OpenOptions, PageFile, PageQueue, QueueOptions, RangeReader,
};
pub use flusher::Flusher;
pub use group::{ChannelGroup, SilenceWatch};
pub use handed::HandedFd;
pub use listener::Listener;
pub use parts::IoPart;
pub use shortage::shortage_advice;
pub use stream::{ByteStream, StreamError};
#[cfg(feature = "tls")]
pub use tls::{Authorization, AuthorizationRule, CryptoProvider, TlsCredentials, TlsFiles};
pub use tls::{CredentialsError, Tls, TlsEndpoint, TlsFault, TlsProblem};
pub use unix_path::{LONGEST_UNIX_PATH, UnixPath};
