//! RDMA: traits for the operations that the engine uses, and their implementation by verbs.
//!
//! # The model
//! A [`Fabric`] represents RDMA on this host. At the source, [`Fabric::resolve`] finds a [`Route`] to a peer. At
//! the destination, a [`Listener`] returns each connect [`Request`] with its private data. Nothing is allocated
//! for a request before it is opened, so an unwanted request costs nothing.
//!
//! Opening a route or a request creates a [`Connection`]: a reliable connected queue pair that is not connected
//! yet. Receives are posted first; then [`Connection::establish`] connects or accepts. Sends, receives and RDMA
//! writes are posted and their completions polled as with verbs, and the names here are those of verbs.
//!
//! An [`Adapter`] is a device with one protection domain. All connections of one fabric over the same device share
//! it, so memory is registered once ([`Adapter::register`]) for all of them. A connection that is opened
//! [apart](QueuePairAttributes::apart) has its own adapter. The peer may write through a connection only if it is
//! opened [with the right](QueuePairAttributes::with_remote_write).
//!
//! [`VerbsFabric`] is the implementation for real adapters: libibverbs and librdmacm, loaded when they are needed.
//!
//! An [`Endpoint`] adds buffers for messages to a connection, and tracks the requests in flight.
//!
//! The guest writes its RAM at any time, so memory is a pointer and a length ([`Memory`]), never a Rust reference.

mod adapter;
#[cfg(feature = "rdma-double")]
pub mod conformance;
mod connection;
#[cfg(feature = "rdma-double")]
pub mod double;
mod endpoint;
mod error;
mod event;
mod fabric;
mod memory;
#[cfg(any(test, feature = "rdma-double"))]
mod transitions;
mod verbs;
mod work;

pub use adapter::{Adapter, AdapterInfo, LockedMemory, PortState};
pub use connection::{ConnectParameters, Connection, Queue, QueuePairAttributes, Wake};
pub use endpoint::{Endpoint, EndpointSizes, Write};
pub use error::{RdmaError, RejectReason};
pub use event::Event;
pub use fabric::{Fabric, Listener, PRIVATE_DATA, PrivateDataLimits, Request, Route};
pub use memory::{Access, Memory, Piece, PinnedMemory, Registration};
pub use verbs::{GidReport, HostReport, PortReport, VerbsFabric};
pub use work::{Completion, CompletionKind, CompletionStatus, Operation, SendRequest};
