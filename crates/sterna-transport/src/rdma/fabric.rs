//! Traits for establishing connections: routes at the source, listeners and requests at the destination.

use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::adapter::{Adapter, AdapterInfo};
use super::connection::{Connection, QueuePairAttributes};
use super::error::RdmaError;
use crate::cancel::CancelFlag;

/// The RDMA devices of this host and its connection manager.
///
/// A fabric has one protection domain for each device. Two fabrics share nothing: a key of one is invalid in the
/// other.
pub trait Fabric: Debug + Send + Sync {
    /// The ports of this host, with their state and limits; empty if it has none.
    ///
    /// # Errors
    /// [`RdmaError::NoLibrary`], [`RdmaError::System`].
    fn adapters(&self) -> Result<Vec<AdapterInfo>, RdmaError>;

    /// Listens for connect requests. With port 0 the system chooses one, see [`Listener::local_address`].
    ///
    /// `[::]` also accepts IPv4 peers. The address can be reused immediately after an earlier listener.
    ///
    /// # Errors
    /// [`RdmaError::Bind`], [`RdmaError::NoDevice`], [`RdmaError::NoLibrary`].
    fn listen(&self, address: SocketAddr, backlog: u32) -> Result<Arc<dyn Listener>, RdmaError>;

    /// Finds the adapter and the route to `address`. The peer's program does not notice it.
    ///
    /// Port 0 means no port, for callers that do not connect: errors then contain only the host.
    ///
    /// # Errors
    /// [`RdmaError::Resolve`], [`RdmaError::NoDevice`], [`RdmaError::NoLibrary`], [`RdmaError::TimedOut`],
    /// [`RdmaError::Cancelled`].
    fn resolve(
        &self,
        address: SocketAddr,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Box<dyn Route>, RdmaError>;
}

/// A resolved route to a peer.
pub trait Route: Debug + Send {
    /// The adapter that reaches the peer.
    fn adapter(&self) -> Arc<dyn Adapter>;

    /// The address that was resolved.
    fn peer(&self) -> SocketAddr;

    /// Allocates a queue pair. [`Connection::establish`] connects it.
    ///
    /// # Errors
    /// [`RdmaError::System`].
    fn open(self: Box<Self>, attributes: &QueuePairAttributes) -> Result<Arc<dyn Connection>, RdmaError>;
}

/// Receives connect requests at an address.
pub trait Listener: Debug + Send + Sync {
    /// The address, with the port that the system chose if the given one was 0.
    fn local_address(&self) -> SocketAddr;

    /// Waits for the next request. A passed `limit`, `cancel` and [`Listener::close`] end the wait.
    ///
    /// When the listener is dropped, requests that were not accepted are rejected.
    ///
    /// # Errors
    /// [`RdmaError::TimedOut`], [`RdmaError::Cancelled`], [`RdmaError::System`].
    fn accept(&self, limit: Option<Duration>, cancel: &CancelFlag) -> Result<Box<dyn Request>, RdmaError>;

    /// Ends every `accept` call, from any thread.
    fn close(&self);
}

/// A peer's connect request. Dropping it rejects it without private data.
///
/// No queue pair or memory is allocated for it before [`Request::open`].
pub trait Request: Debug + Send {
    /// The adapter that the request arrived on.
    fn adapter(&self) -> Arc<dyn Adapter>;

    /// Address of the requesting side.
    fn peer(&self) -> SocketAddr;

    /// The private data, always [`PrivateDataLimits::request`] bytes. Bytes after the peer's own are undefined.
    fn private_data(&self) -> &[u8];

    /// Rejects the request. The peer finds `private_data` in its [`RdmaError::Rejected`].
    ///
    /// # Errors
    /// [`RdmaError::PrivateData`], [`RdmaError::System`].
    fn reject(self: Box<Self>, private_data: &[u8]) -> Result<(), RdmaError>;

    /// Allocates a queue pair. [`Connection::establish`] then accepts the request.
    ///
    /// # Errors
    /// [`RdmaError::System`].
    fn open(self: Box<Self>, attributes: &QueuePairAttributes) -> Result<Arc<dyn Connection>, RdmaError>;
}

/// Maximum private data of the connection manager's messages, in bytes. The receiver always gets this many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrivateDataLimits {
    /// Maximum in a connect request.
    pub request: usize,
    /// Maximum in the reply that accepts.
    pub reply: usize,
    /// Maximum in a reject message.
    pub reject: usize,
}

/// The limits of InfiniBand and RoCE.
pub const PRIVATE_DATA: PrivateDataLimits = PrivateDataLimits { request: 56, reply: 196, reject: 148 };
