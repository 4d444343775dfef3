//! A queue pair with its buffers: sends and receives messages, writes memory, and tracks completions.

mod failure;
mod receiving;
mod sending;
mod sizes;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::adapter::Adapter;
use super::connection::Connection;
use super::error::RdmaError;
use super::memory::{Access, Memory, Registration};
use crate::cancel::CancelFlag;
use receiving::Receiving;
use sending::Sending;
pub use sizes::{EndpointSizes, Write};

/// A connection with registered buffers for messages, which tracks the requests in flight.
///
/// Messages are copied into and out of the buffers. For writes, the caller registers the memory. One thread may
/// receive while another sends, and a third may shut the endpoint down. The endpoint does not count credits:
/// [`Endpoint::post_receives`] must be called before the peer sends, and the protocol above decides which side
/// sends.
///
/// Dropping it destroys the queue pair and then deregisters the buffers.
#[derive(Debug)]
pub struct Endpoint {
    connection: Arc<dyn Connection>,
    sizes: EndpointSizes,
    receiving: Receiving,
    sending: Mutex<Sending>,
    in_flight: AtomicU64,
    closed: CancelFlag,
    receiving_over: CancelFlag,
}

impl Endpoint {
    /// Registers buffers for a connection that was opened with [`EndpointSizes::attributes`], established or not.
    ///
    /// # Errors
    /// [`RdmaError::LockedMemory`], [`RdmaError::Registration`], [`RdmaError::System`].
    pub fn new(connection: Arc<dyn Connection>, sizes: &EndpointSizes) -> Result<Self, RdmaError> {
        let adapter = connection.adapter();
        let receiving =
            Receiving::new(sizes.message_bytes, buffers(&*adapter, sizes, sizes.receives, Access::RECEIVE)?);
        let sending = Sending::new(sizes, buffers(&*adapter, sizes, sizes.sends, Access::SOURCE)?);
        let (in_flight, closed, receiving_over) = (AtomicU64::new(0), CancelFlag::new(), CancelFlag::new());
        Ok(Self {
            connection,
            sizes: *sizes,
            receiving,
            sending: Mutex::new(sending),
            in_flight,
            closed,
            receiving_over,
        })
    }

    /// The connection, for example to establish it, revoke rights or query its end.
    pub fn connection(&self) -> &Arc<dyn Connection> {
        &self.connection
    }

    /// The sizes that the endpoint was made with.
    pub fn sizes(&self) -> EndpointSizes {
        self.sizes
    }

    /// Posts `count` receives, so that the peer may send as many more messages.
    ///
    /// After the end of the connection it succeeds without effect: [`Endpoint::receive`] returns the earlier
    /// messages and then the end.
    ///
    /// # Errors
    /// [`RdmaError::QueueFull`] if more receives would be posted than there are buffers; as
    /// [`Connection::post_receive`].
    pub fn post_receives(&self, count: usize) -> Result<(), RdmaError> {
        (0..count).try_for_each(|_| self.receiving.post(&*self.connection))
    }

    /// Returns the next message, or `None` if none arrives within `limit`. One thread at a time may call it.
    ///
    /// # Errors
    /// [`RdmaError::Ended`] after all earlier messages were received, [`RdmaError::Failed`], [`RdmaError::Cancelled`]
    /// after [`Endpoint::finish_receiving`] or [`Endpoint::shutdown`], [`RdmaError::System`].
    pub fn receive(&self, limit: Option<Duration>) -> Result<Option<Vec<u8>>, RdmaError> {
        let received = self.receiving.receive(&*self.connection, limit, &self.receiving_over);
        received.map_err(|error| self.first_cause(error))
    }

    /// Sends one message that consists of `parts`, after all earlier sends and writes.
    ///
    /// The parts are copied; the call waits for a free buffer. It fails if no request completes for `limit` meanwhile.
    ///
    /// # Errors
    /// [`RdmaError::Failed`], also for earlier requests; [`RdmaError::TimedOut`], [`RdmaError::Ended`],
    /// [`RdmaError::Cancelled`], [`RdmaError::System`]. [`RdmaError::MessageTooLong`].
    pub fn send(&self, parts: &[&[u8]], limit: Option<Duration>) -> Result<(), RdmaError> {
        let len = parts.iter().map(|part| part.len()).sum();
        if len > self.sizes.message_bytes as usize {
            return Err(RdmaError::MessageTooLong { len, limit: self.sizes.message_bytes as usize });
        }
        self.sending.lock().send(parts, len as u32, &self.waiter(limit))
    }

    /// Posts writes, in order, and waits while [`EndpointSizes::writes`] are in flight.
    ///
    /// The writes may still be in flight when it returns: see [`Endpoint::flush`].
    ///
    /// # Errors
    /// As [`Endpoint::send`].
    pub fn write(&self, writes: &[Write], limit: Option<Duration>) -> Result<(), RdmaError> {
        self.sending.lock().write(writes, &self.waiter(limit))
    }

    /// Waits until all sends and writes are complete.
    ///
    /// # Errors
    /// As [`Endpoint::send`].
    pub fn flush(&self, limit: Option<Duration>) -> Result<(), RdmaError> {
        self.sending.lock().flush(&self.waiter(limit))
    }

    /// Processes available completions, without waiting.
    ///
    /// # Errors
    /// As [`Endpoint::send`].
    pub fn reap(&self) -> Result<(), RdmaError> {
        self.sending.lock().reap(&self.waiter(None))
    }

    /// Waits until at most `most` writes are in flight.
    ///
    /// # Errors
    /// As [`Endpoint::send`].
    pub fn wait_for_writes(&self, most: usize, limit: Option<Duration>) -> Result<(), RdmaError> {
        self.sending.lock().wait_for_writes(most, &self.waiter(limit))
    }

    /// Number of writes that were posted and are not known to be complete.
    pub fn writes_in_flight(&self) -> usize {
        self.sending.lock().writes_in_flight()
    }

    /// Number of bytes in sends and writes that were posted and are not known to be complete.
    pub fn bytes_in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Cancels blocked and later calls of [`Endpoint::receive`], from any thread. Sending continues.
    pub fn finish_receiving(&self) {
        self.receiving_over.cancel();
    }

    /// Revokes the peer's right to write.
    ///
    /// After it returns, nothing is written over this connection any more, and later writes of the peer are not
    /// executed. Messages that the peer has sent can still be received, also after the end of the connection.
    ///
    /// # Errors
    /// As [`Connection::set_remote_write`]. The queue pair was then destroyed: nothing is written in that case
    /// either, and nothing can be received.
    pub fn end_remote_writes(&self) -> Result<(), RdmaError> {
        self.connection.set_remote_write(false).inspect_err(|_| self.connection.destroy())
    }

    /// Ends the connection, from any thread: blocked and later calls fail.
    pub fn shutdown(&self) {
        self.closed.cancel();
        self.finish_receiving();
        self.connection.disconnect();
    }

    /// Returns the error of the request that caused a flush instead of the flushed one. It contains the reason.
    fn first_cause(&self, error: RdmaError) -> RdmaError {
        use super::work::CompletionStatus::WorkRequestFlushed;
        if !matches!(error, RdmaError::Failed { status: WorkRequestFlushed, .. }) {
            return error;
        }
        match self.reap() {
            Err(RdmaError::Failed { status: WorkRequestFlushed, .. }) | Ok(()) => error,
            Err(first) => first,
        }
    }

    fn waiter(&self, limit: Option<Duration>) -> sending::Waiter<'_> {
        let (connection, closed, in_flight) = (&*self.connection, &self.closed, &self.in_flight);
        sending::Waiter { connection, closed, in_flight, limit }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // The adapter must not use the buffers any more when they are dropped.
        self.connection.destroy();
    }
}

/// Registers memory for `count` messages.
fn buffers(
    adapter: &dyn Adapter,
    sizes: &EndpointSizes,
    count: u32,
    access: Access,
) -> Result<Registration, RdmaError> {
    let len = sizes.message_bytes.max(1) as usize * count.max(1) as usize;
    let memory = Memory::anonymous(len).map_err(|error| RdmaError::System {
        subject: "buffers for messages".to_owned(),
        call: "mmap",
        source: std::io::Error::other(error),
    })?;
    adapter.register(memory, access)
}
