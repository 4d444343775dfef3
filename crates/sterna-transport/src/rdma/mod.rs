//! RDMA: what the engine uses of an adapter, as traits.
//!
//! # The model
//! A [`Fabric`] is this host's way to RDMA. At the source, [`Fabric::resolve`] gives a [`Route`] to a peer; at the
//! destination, a [`Listener`] gives each connect [`Request`] with its private data. Nothing is allocated for a request
//! before it is opened, so a stranger's request costs nothing.
//!
//! Opening a route or a request gives a [`Connection`]: a reliable connected queue pair that is not connected yet. Receives
//! are posted first, then [`Connection::establish`] connects or accepts. Sends, receives and RDMA writes are posted,
//! and their completions are polled, as with verbs: the names here are those of verbs.
//!
//! An [`Adapter`] is a device with one protection domain. All connections of one fabric over the same device share it, so
//! memory that is registered once ([`Adapter::register`]) serves all of them.
//!
//! [`VerbsFabric`] is the one with adapters in it: libibverbs and librdmacm, loaded when they are needed.
//!
//! An [`Endpoint`] adds buffers for messages, and knows what is in flight.
//!
//! Guest RAM is written concurrently, so memory is a pointer and a length ([`Memory`]), never a Rust reference.

mod adapter;
#[cfg(feature = "rdma-double")]
pub mod conformance;
mod connection;
#[cfg(feature = "rdma-double")]
pub mod double;
mod endpoint;
mod error;
mod fabric;
mod memory;
mod verbs;
mod work;

pub use adapter::{Adapter, AdapterInfo, LockedMemory, PortState};
pub use connection::{ConnectParameters, Connection, Event, Queue, QueuePairAttributes, Wake};
pub use endpoint::{Endpoint, EndpointSizes, Write};
pub use error::{RdmaError, RejectReason};
pub use fabric::{Fabric, Listener, PRIVATE_DATA, PrivateDataLimits, Request, Route};
pub use memory::{Access, Memory, Piece, PinnedMemory, Registration};
pub use verbs::{GidReport, HostReport, PortReport, VerbsFabric};
pub use work::{Completion, CompletionKind, CompletionStatus, Operation, SendRequest};
