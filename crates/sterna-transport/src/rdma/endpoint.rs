//! A queue pair with its buffers: messages, writes, and their completions.

mod receiving;
mod sending;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::{
    Access, Adapter, CompletionStatus, Connection, Event, Memory, Piece, PortState, QueuePairAttributes,
    RdmaError, Registration,
};
use crate::CancelFlag;
use receiving::Receiving;
use sending::Sending;

/// A connection with registered buffers for messages, which knows what is in flight.
///
/// Messages are copied into and out of the buffers; memory that is written is registered by whoever writes. One thread may
/// receive while another sends; any third shuts it down. It knows nothing of credits: before a peer may send,
/// [`Endpoint::post_receives`] has to be called, and whose turn it is to send is for the protocol above.
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

/// How much an endpoint holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndpointSizes {
    /// The longest message, both ways.
    pub message_bytes: u32,
    /// Buffers for messages that come.
    pub receives: u32,
    /// Buffers for messages that go.
    pub sends: u32,
    /// Writes that may be in flight.
    pub writes: u32,
}

impl EndpointSizes {
    /// For messages alone.
    pub const fn messages(message_bytes: u32, receives: u32, sends: u32) -> Self {
        Self { message_bytes, receives, sends, writes: 0 }
    }

    /// And so many writes.
    #[must_use]
    pub const fn with_writes(mut self, writes: u32) -> Self {
        self.writes = writes;
        self
    }

    /// What the queue pair has to be made with.
    pub const fn attributes(&self) -> QueuePairAttributes {
        QueuePairAttributes::new(self.sends + self.writes, self.receives)
    }
}

/// Bytes of this side that are written into the peer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// Where they are.
    pub from: Piece,
    /// The address in the peer's process.
    pub address: u64,
    /// The key of the peer's registration.
    pub rkey: u32,
}

impl Endpoint {
    /// Registers buffers for a connection that was opened with [`EndpointSizes::attributes`]. It need not be established.
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

    /// Its connection, to establish it, to take rights away, and to look at its end.
    pub fn connection(&self) -> &Arc<dyn Connection> {
        &self.connection
    }

    /// How much it holds.
    pub fn sizes(&self) -> EndpointSizes {
        self.sizes
    }

    /// Posts so many receives: lets so many more messages come.
    ///
    /// # Errors
    /// [`RdmaError::QueueFull`] if more would be posted than there are buffers; as [`Connection::post_receive`].
    pub fn post_receives(&self, count: usize) -> Result<(), RdmaError> {
        (0..count).try_for_each(|_| self.receiving.post(&*self.connection))
    }

    /// The next message. Waits for it, `limit` at most: then `None`. One thread at a time.
    ///
    /// # Errors
    /// [`RdmaError::Ended`] when all that came before has been received, [`RdmaError::Failed`], [`RdmaError::Cancelled`]
    /// after [`Endpoint::finish_receiving`] or [`Endpoint::shutdown`], [`RdmaError::System`].
    pub fn receive(&self, limit: Option<Duration>) -> Result<Option<Vec<u8>>, RdmaError> {
        let received = self.receiving.receive(&*self.connection, limit, &self.receiving_over);
        received.map_err(|error| self.first_cause(error))
    }

    /// Sends a message: the parts one after the other. Copies them, and waits until there is a buffer; what is sent goes
    /// after everything that was sent and written before. If nothing moves for `limit` meanwhile, it fails.
    ///
    /// # Errors
    /// [`RdmaError::Failed`] also for requests before this one; [`RdmaError::TimedOut`], [`RdmaError::Ended`],
    /// [`RdmaError::Cancelled`], [`RdmaError::System`]. [`RdmaError::MessageTooLong`].
    pub fn send(&self, parts: &[&[u8]], limit: Option<Duration>) -> Result<(), RdmaError> {
        let len = parts.iter().map(|part| part.len()).sum();
        if len > self.sizes.message_bytes as usize {
            return Err(RdmaError::MessageTooLong { len, limit: self.sizes.message_bytes as usize });
        }
        self.sending.lock().send(parts, len as u32, &self.waiter(limit))
    }

    /// Posts writes, in order. Waits while [`EndpointSizes::writes`] are in flight. When this returns, they need not be
    /// complete: see [`Endpoint::flush`].
    ///
    /// # Errors
    /// As [`Endpoint::send`].
    pub fn write(&self, writes: &[Write], limit: Option<Duration>) -> Result<(), RdmaError> {
        self.sending.lock().write(writes, &self.waiter(limit))
    }

    /// Waits until everything that was sent and written is complete.
    ///
    /// # Errors
    /// As [`Endpoint::send`].
    pub fn flush(&self, limit: Option<Duration>) -> Result<(), RdmaError> {
        self.sending.lock().flush(&self.waiter(limit))
    }

    /// Takes in completions that are there, without waiting.
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

    /// Writes that were posted and are not known to be complete.
    pub fn writes_in_flight(&self) -> usize {
        self.sending.lock().writes_in_flight()
    }

    /// Bytes that were posted to be sent or written and are not known to be complete.
    pub fn bytes_in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Ends receiving from any thread: blocked and later calls of [`Endpoint::receive`] are cancelled. Sending goes on.
    pub fn finish_receiving(&self) {
        self.receiving_over.cancel();
    }

    /// Ends the connection from any thread: every blocked or later call fails.
    pub fn shutdown(&self) {
        self.closed.cancel();
        self.finish_receiving();
        self.connection.disconnect();
    }

    /// When a request fails, receives are flushed: then that request's error, which says why.
    fn first_cause(&self, error: RdmaError) -> RdmaError {
        use CompletionStatus::WorkRequestFlushed;
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
        // Before the buffers go.
        self.connection.destroy();
    }
}

/// Memory for so many messages.
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

/// The buffer of message `slot`, of so many bytes.
fn place(buffers: &Registration, message_bytes: u32, slot: u32, len: u32) -> Piece {
    let offset = slot as usize * message_bytes as usize;
    buffers.piece(offset, len).unwrap_or(Piece::EMPTY)
}

/// A request of this side has failed.
fn failed(
    connection: &dyn Connection,
    operation: &'static str,
    status: CompletionStatus,
    remote_address: Option<u64>,
) -> RdmaError {
    let peer = connection.peer().to_string();
    match connection.end() {
        // Flushed by the end of the connection.
        Some(event) if status == CompletionStatus::WorkRequestFlushed => {
            RdmaError::Ended { peer, event: Some(event) }
        }
        // Nobody could answer.
        None if status == CompletionStatus::RetryExceeded && has_no_link(connection) => {
            RdmaError::Ended { peer, event: Some(Event::PortDown) }
        }
        _ => RdmaError::Failed { peer, operation, status, remote_address },
    }
}

fn has_no_link(connection: &dyn Connection) -> bool {
    connection.adapter().info().state == PortState::Down
}
