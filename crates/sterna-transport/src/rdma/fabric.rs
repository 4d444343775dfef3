//! How connections come about.

use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::{Adapter, AdapterInfo, Connection, QueuePairAttributes, RdmaError};
use crate::CancelFlag;

/// This host's way to RDMA: its devices and its connection manager.
///
/// A fabric has one protection domain for each device. Two fabrics share nothing: a key of one is not valid in the other.
pub trait Fabric: Debug + Send + Sync {
    /// The ports that this host has, with their state and limits. Empty if it has none.
    ///
    /// # Errors
    /// [`RdmaError::NoLibrary`], [`RdmaError::System`].
    fn adapters(&self) -> Result<Vec<AdapterInfo>, RdmaError>;

    /// Listens for connect requests. Port 0 lets the system choose, see [`Listener::local_address`]; `[::]` takes
    /// IPv4 peers, too. The address is reused at once after an earlier listener.
    ///
    /// # Errors
    /// [`RdmaError::Bind`], [`RdmaError::NoDevice`], [`RdmaError::NoLibrary`].
    fn listen(&self, address: SocketAddr, backlog: u32) -> Result<Arc<dyn Listener>, RdmaError>;

    /// Finds the adapter that leads to `address`, and the route. Sends nothing that the peer's program would see. Port 0
    /// stands for none, where nobody wants to connect: errors then name the host alone.
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
    /// The adapter that it leads over.
    fn adapter(&self) -> Arc<dyn Adapter>;

    /// Where it leads.
    fn peer(&self) -> SocketAddr;

    /// Allocates a queue pair. [`Connection::establish`] connects it.
    ///
    /// # Errors
    /// [`RdmaError::System`].
    fn open(self: Box<Self>, attributes: &QueuePairAttributes) -> Result<Arc<dyn Connection>, RdmaError>;
}

/// Waits for connect requests.
pub trait Listener: Debug + Send + Sync {
    /// Where it listens, with the port that the system chose.
    fn local_address(&self) -> SocketAddr;

    /// The next request: until it comes, `limit` passes, `cancel` is cancelled, or the listener is closed. Requests that
    /// nobody fetched are rejected when the listener is dropped.
    ///
    /// # Errors
    /// [`RdmaError::TimedOut`], [`RdmaError::Cancelled`], [`RdmaError::System`].
    fn accept(&self, limit: Option<Duration>, cancel: &CancelFlag) -> Result<Box<dyn Request>, RdmaError>;

    /// Ends every accept, from any thread.
    fn close(&self);
}

/// A peer's connect request. No queue pair or memory is allocated for it yet. Dropping it rejects it without private data.
pub trait Request: Debug + Send {
    /// The adapter that it came over.
    fn adapter(&self) -> Arc<dyn Adapter>;

    /// Who asks.
    fn peer(&self) -> SocketAddr;

    /// The private data: [`PrivateDataLimits::request`] bytes. Those beyond what the peer sent may be anything.
    fn private_data(&self) -> &[u8];

    /// Refuses it; the peer reads `private_data` in its [`RdmaError::Rejected`].
    ///
    /// # Errors
    /// [`RdmaError::PrivateData`], [`RdmaError::System`].
    fn reject(self: Box<Self>, private_data: &[u8]) -> Result<(), RdmaError>;

    /// Allocates a queue pair. [`Connection::establish`] accepts the request.
    ///
    /// # Errors
    /// [`RdmaError::System`].
    fn open(self: Box<Self>, attributes: &QueuePairAttributes) -> Result<Arc<dyn Connection>, RdmaError>;
}

/// How many bytes of private data a message of the connection manager carries at most. The receiver is always given this many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrivateDataLimits {
    /// In a connect request.
    pub request: usize,
    /// In the reply that accepts.
    pub reply: usize,
    /// In a reject.
    pub reject: usize,
}

/// The limits over InfiniBand and RoCE.
pub const PRIVATE_DATA: PrivateDataLimits = PrivateDataLimits { request: 56, reply: 196, reject: 148 };
