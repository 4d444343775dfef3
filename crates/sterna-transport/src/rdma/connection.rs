//! A connection: one reliable connected queue pair and its completion queues.

use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::adapter::Adapter;
use super::error::RdmaError;
use super::event::Event;
use super::memory::Piece;
use super::work::{Completion, SendRequest};
use crate::cancel::CancelFlag;

/// A queue pair with two completion queues, for sends and for receives. Several threads may use it.
///
/// Dropping it destroys the queue pair and the completion queues. Registrations are not affected.
pub trait Connection: Debug + Send + Sync {
    /// The adapter of the queue pair; memory for its requests must be registered there.
    fn adapter(&self) -> Arc<dyn Adapter>;

    /// Address of the other side.
    fn peer(&self) -> SocketAddr;

    /// Connects (after [`super::Route::open`]) or accepts (after [`super::Request::open`]), and waits until the
    /// connection is established.
    ///
    /// Returns the private data of the peer's reply; empty at the accepting side. Can be called once.
    ///
    /// # Errors
    /// [`RdmaError::Rejected`], [`RdmaError::PrivateData`] (before anything is sent), [`RdmaError::Ended`],
    /// [`RdmaError::TimedOut`], [`RdmaError::Cancelled`], [`RdmaError::System`].
    fn establish(
        &self,
        parameters: &ConnectParameters<'_>,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Vec<u8>, RdmaError>;

    /// Posts a receive; possible before the connection is established.
    ///
    /// After the end of the connection some adapters refuse it. Others complete it as flushed, or never.
    ///
    /// # Errors
    /// [`RdmaError::QueueFull`], [`RdmaError::System`]. [`RdmaError::Ended`] with the event if the adapter refuses
    /// it after the end, and without an event after [`Connection::destroy`].
    fn post_receive(&self, id: u64, into: Piece) -> Result<(), RdmaError>;

    /// Posts requests, in order, with one call of the adapter. They are executed in order.
    ///
    /// A failed request completes with an error even if it is not signalled. It puts the queue pair into the error
    /// state and flushes all other requests.
    ///
    /// A request occupies a slot of the send queue until its completion, or that of a later signalled request, has
    /// been polled. At least one request per queue length must therefore be signalled.
    ///
    /// # Errors
    /// [`RdmaError::QueueFull`] contains the number of requests that were posted. [`RdmaError::Ended`] as for
    /// [`Connection::post_receive`]. [`RdmaError::System`], with EINVAL before the connection is established.
    fn post_send(&self, requests: &[SendRequest]) -> Result<(), RdmaError>;

    /// Appends available completions to `to`, at most `most`, and returns their count. Does not wait.
    ///
    /// After an error all outstanding requests and receives complete as flushed.
    ///
    /// # Errors
    /// [`RdmaError::Ended`] after [`Connection::destroy`], [`RdmaError::System`] (for example a completion queue that
    /// overflowed).
    fn poll(&self, queue: Queue, to: &mut Vec<Completion>, most: usize) -> Result<usize, RdmaError>;

    /// Waits for a completion of `queue`, the connection's end, the deadline or a cancel.
    ///
    /// Completions come first: the end is reported only when the queue is empty. Requests may still be outstanding
    /// then; [`Connection::disconnect`] flushes them. Only one thread at a time may wait for a queue.
    ///
    /// # Errors
    /// [`RdmaError::Ended`] after [`Connection::destroy`], [`RdmaError::System`].
    fn wait(&self, queue: Queue, deadline: Option<Instant>, cancel: &CancelFlag) -> Result<Wake, RdmaError>;

    /// Grants or revokes the peer's right to write through this queue pair. Call it while the connection is
    /// established.
    ///
    /// Connecting and accepting set the right that [`QueuePairAttributes`] define. After a successful call with
    /// `false`, no byte is written through this queue pair any more, not even by writes that have already started.
    /// A later write of the peer puts its queue pair into the error state, and with some adapters this one too.
    /// Sends and receives continue.
    ///
    /// A queue pair in the error state has no rights, so `false` succeeds there, and earlier receives can still be
    /// polled. If an adapter refuses the change, `false` puts the queue pair into the error state, which ends the
    /// connection.
    ///
    /// # Errors
    /// [`RdmaError::Ended`] after [`Connection::destroy`]. [`RdmaError::System`] with `true` and EINVAL after the
    /// end, as most adapters answer. With `false`, [`RdmaError::System`] means that the right could not be
    /// revoked: destroy the queue pair instead.
    fn set_remote_write(&self, allowed: bool) -> Result<(), RdmaError>;

    /// The next event that was not returned yet. Does not wait.
    fn poll_event(&self) -> Option<Event>;

    /// The event that ended the connection; `None` while it is usable or not yet established.
    fn end(&self) -> Option<Event>;

    /// Ends the connection, from any thread, without waiting. Both sides get [`Event::Disconnected`].
    ///
    /// The queue pair enters the error state. Sends that completed before have arrived.
    fn disconnect(&self);

    /// Disconnects and destroys the queue pair. After it returns, no memory is read or written through it.
    ///
    /// Any thread may call it, more than once. Waits end with [`RdmaError::Ended`].
    fn destroy(&self);
}

/// Settings of a new queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueuePairAttributes {
    /// Number of requests that the send queue can contain.
    pub send_requests: u32,
    /// Number of receives that the receive queue can contain.
    pub receives: u32,
    /// Whether the peer may write through the queue pair: see [`Connection::set_remote_write`].
    pub remote_write: bool,
    /// Whether the queue pair has its own protection domain: see [`QueuePairAttributes::apart`].
    pub is_apart: bool,
}

impl QueuePairAttributes {
    /// Attributes without remote writes, in the fabric's protection domain.
    ///
    /// Each request has one scatter element and no inline data. Only signalled requests get completions. Each
    /// completion queue has as many entries as its work queue.
    pub const fn new(send_requests: u32, receives: u32) -> Self {
        Self { send_requests, receives, remote_write: false, is_apart: false }
    }

    /// Lets the peer write through the queue pair.
    ///
    /// The right exists from the moment when [`Connection::establish`] accepts or connects, before the peer has
    /// confirmed the connection.
    #[must_use]
    pub const fn with_remote_write(mut self) -> Self {
        self.remote_write = true;
        self
    }

    /// Gives the queue pair its own protection domain.
    ///
    /// It can access only memory that is registered with its own [`Connection::adapter`]. This also covers the
    /// moment in which the connection manager, while it connects, lets the peer write through every queue pair.
    #[must_use]
    pub const fn apart(mut self) -> Self {
        self.is_apart = true;
        self
    }
}

/// Contents of a connect request or its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectParameters<'a> {
    /// Data for the peer's program; [`super::PRIVATE_DATA`] defines the maximum length.
    pub private_data: &'a [u8],
    /// Number of RDMA reads that this side answers in parallel.
    pub responder_resources: u8,
    /// Number of RDMA reads that this side may have outstanding.
    pub initiator_depth: u8,
    /// Number of retransmissions of an unanswered packet (0 to 7).
    pub retry_count: u8,
    /// Number of times that the *peer* retries a send for which no receive is posted here. 0 means never; 7 means
    /// without limit.
    pub rnr_retry_count: u8,
}

impl<'a> ConnectParameters<'a> {
    /// The parameters of QEMU's source: RNR retry count 0, five retransmissions.
    pub const fn connect(private_data: &'a [u8]) -> Self {
        Self { private_data, responder_resources: 0, initiator_depth: 2, retry_count: 5, rnr_retry_count: 0 }
    }

    /// The parameters of QEMU's destination.
    pub const fn accept(private_data: &'a [u8]) -> Self {
        Self { private_data, responder_resources: 2, initiator_depth: 0, retry_count: 5, rnr_retry_count: 0 }
    }
}

/// One of a connection's completion queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    /// The queue of completed sends and writes.
    Send,
    /// The queue of completed receives.
    Receive,
}

/// Reason why [`Connection::wait`] returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// The queue has a completion.
    Completion,
    /// The queue is empty and the connection has ended: see [`Connection::end`].
    Ended,
    /// The deadline passed without a completion.
    TimedOut,
    /// The cancel flag was set.
    Cancelled,
}
