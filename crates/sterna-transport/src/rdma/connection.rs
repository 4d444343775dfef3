//! A connection: one reliable connected queue pair and its completion queues.

use std::fmt::{self, Debug};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Adapter, Completion, Piece, RdmaError, SendRequest};
use crate::CancelFlag;

/// A queue pair with a completion queue for sends and one for receives. Usable from several threads.
///
/// Dropping it destroys the queue pair and the completion queues. Registrations are not affected.
pub trait Connection: Debug + Send + Sync {
    /// The adapter that it goes over.
    fn adapter(&self) -> Arc<dyn Adapter>;

    /// Who is at the other end.
    fn peer(&self) -> SocketAddr;

    /// Connects (a connection that a route opened) or accepts (one that a request opened), and waits until the connection
    /// is established. Gives the private data of the peer's reply, or nothing at the side that accepts. Once only.
    ///
    /// # Errors
    /// [`RdmaError::Rejected`], [`RdmaError::PrivateData`] (nothing is sent then), [`RdmaError::Ended`],
    /// [`RdmaError::TimedOut`], [`RdmaError::Cancelled`], [`RdmaError::System`].
    fn establish(
        &self,
        parameters: &ConnectParameters<'_>,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Vec<u8>, RdmaError>;

    /// Posts a receive; also before the connection is established.
    ///
    /// # Errors
    /// [`RdmaError::QueueFull`], [`RdmaError::Ended`] after [`Connection::destroy`], [`RdmaError::System`].
    fn post_receive(&self, id: u64, into: Piece) -> Result<(), RdmaError>;

    /// Posts requests, in order, with one call of the adapter. They are executed in order. A failed request completes
    /// with an error even if it is not signalled, puts the queue pair into the error state, and flushes all others.
    ///
    /// A request holds a place in the send queue until it, or a later one that is signalled, has been polled as a
    /// completion. So sign one request in each queue's worth at least.
    ///
    /// # Errors
    /// [`RdmaError::QueueFull`] says how many of them were posted; [`RdmaError::Ended`] after [`Connection::destroy`];
    /// [`RdmaError::System`], with EINVAL before the connection is established.
    fn post_send(&self, requests: &[SendRequest]) -> Result<(), RdmaError>;

    /// Appends completions that are there to `to`, at most `most`, and says how many. Does not wait. After an error all
    /// outstanding requests and receives complete as flushed.
    ///
    /// # Errors
    /// [`RdmaError::Ended`] after [`Connection::destroy`], [`RdmaError::System`] (for example a completion queue that
    /// overflowed).
    fn poll(&self, queue: Queue, to: &mut Vec<Completion>, most: usize) -> Result<usize, RdmaError>;

    /// Waits until `queue` has a completion, the connection has ended, the deadline passes, or `cancel` is cancelled.
    /// A completion comes first: the end is reported only while the queue is empty. Requests may be outstanding then;
    /// [`Connection::disconnect`] flushes them. One thread at a time may wait for a queue.
    ///
    /// # Errors
    /// [`RdmaError::Ended`] after [`Connection::destroy`], [`RdmaError::System`].
    fn wait(&self, queue: Queue, deadline: Option<Instant>, cancel: &CancelFlag) -> Result<Wake, RdmaError>;

    /// Whether the peer may write through this queue pair; it may from the start. When a call with `false` has returned,
    /// no byte is written through this queue pair any more, also none of writes that have begun. A write that the peer
    /// tries then puts its queue pair into the error state, and with some adapters this one, too. Sends and receives go on.
    ///
    /// # Errors
    /// [`RdmaError::System`]. An error says that the right could not be taken away: destroy the queue pair instead.
    fn set_remote_write(&self, allowed: bool) -> Result<(), RdmaError>;

    /// The next event that was not given yet. Does not wait.
    fn poll_event(&self) -> Option<Event>;

    /// What ended the connection, from then on; `None` while it is usable or not yet established.
    fn end(&self) -> Option<Event>;

    /// Ends the connection, from any thread: the queue pair goes into the error state, the peer gets
    /// [`Event::Disconnected`], and so does this side. Completed sends have arrived. Does not wait.
    fn disconnect(&self);

    /// Disconnects, and destroys the queue pair: when this returns, nothing reads or writes memory through it any more.
    /// From any thread, any number of times; waits end with [`RdmaError::Ended`].
    fn destroy(&self);
}

/// What a queue pair is made with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueuePairAttributes {
    /// Requests that the send queue holds.
    pub send_requests: u32,
    /// Receives that the receive queue holds.
    pub receives: u32,
}

impl QueuePairAttributes {
    /// One scatter element for each request, nothing inline, completions only where asked for. The completion queues hold
    /// as many entries as the queues.
    pub const fn new(send_requests: u32, receives: u32) -> Self {
        Self { send_requests, receives }
    }
}

/// What a connect request or its reply carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectParameters<'a> {
    /// For the peer's program; see [`super::PRIVATE_DATA`] for how many bytes.
    pub private_data: &'a [u8],
    /// RDMA reads that we answer at once.
    pub responder_resources: u8,
    /// RDMA reads that we have outstanding.
    pub initiator_depth: u8,
    /// How often an unanswered packet is sent again (0 to 7).
    pub retry_count: u8,
    /// How often the *peer* tries a send again for which no receive was posted here: 0 never, 7 for ever.
    pub rnr_retry_count: u8,
}

impl<'a> ConnectParameters<'a> {
    /// As QEMU's source connects: an RNR retry count of 0, five retries.
    pub const fn connect(private_data: &'a [u8]) -> Self {
        Self { private_data, responder_resources: 0, initiator_depth: 2, retry_count: 5, rnr_retry_count: 0 }
    }

    /// As QEMU's destination accepts.
    pub const fn accept(private_data: &'a [u8]) -> Self {
        Self { private_data, responder_resources: 2, initiator_depth: 0, retry_count: 5, rnr_retry_count: 0 }
    }
}

/// One of a connection's completion queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    /// Of posted sends and writes.
    Send,
    /// Of posted receives.
    Receive,
}

/// How a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// There is a completion.
    Completion,
    /// The queue is empty and the connection has ended: see [`Connection::end`].
    Ended,
    /// The deadline passed.
    TimedOut,
    /// The flag was cancelled.
    Cancelled,
}

/// What happened to a connection or its adapter, other than a completion.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The connection is established.
    Established,
    /// This side or the peer disconnected, or the peer's process is gone.
    Disconnected,
    /// The port has lost its link. The connection survives until its retries are used up.
    PortDown,
    /// The port has its link again.
    PortUp,
    /// The device was removed.
    DeviceRemoved,
    /// The queue pair or a completion queue failed in the adapter; what it said.
    Fatal(String),
}

impl Event {
    /// Whether the connection is unusable after it.
    pub fn is_end(&self) -> bool {
        matches!(self, Event::Disconnected | Event::DeviceRemoved | Event::Fatal(_))
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Established => f.write_str("the connection is established"),
            Event::Disconnected => f.write_str("the connection was closed"),
            Event::PortDown => f.write_str("the port lost its link"),
            Event::PortUp => f.write_str("the port has a link"),
            Event::DeviceRemoved => f.write_str("the device was removed"),
            Event::Fatal(what) => write!(f, "the adapter reported: {what}"),
        }
    }
}
