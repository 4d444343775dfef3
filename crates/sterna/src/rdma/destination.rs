//! The destination's end of the stream over RDMA.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sterna_transport::rdma::{ConnectParameters, Endpoint, QueuePairAttributes, Request};
use sterna_transport::{ByteStream, CancelFlag, StreamError};
use sterna_wire::rdma::session::{Arrival, Commander, DestinationSession};
use sterna_wire::rdma::{ConnectReply, Header, MessageType};

use super::commands::{Patience, StreamFailure, broken, empty, or_end, receive, say_error, send};
use super::leftover::Leftover;
use super::return_path::Writer;
use super::sizes::{LAST_WORDS, sizes};

/// Reads the stream on the main connection, and writes the return path.
#[derive(Debug)]
pub struct DestinationStream {
    main: Endpoint,
    incoming: Mutex<(DestinationSession, Leftover)>,
    back: OnceLock<Writer>,
    /// Whether all memory is registered together (pin-all), as both sides have agreed.
    pins_all: bool,
    has_begun_phases: AtomicBool,
    is_reading_over: AtomicBool,
}

impl DestinationStream {
    /// Accepts a request as the main connection.
    ///
    /// # Errors
    /// [`StreamError::Rdma`] if the connection cannot be established.
    pub fn accept(
        request: Box<dyn Request>,
        reply: &ConnectReply,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Self, StreamError> {
        let mut session = DestinationSession::new();
        let attributes = sizes(0).attributes().with_remote_write();
        let main = accept(request, &attributes, reply, session.starting(), limit, cancel)?;
        let incoming = Mutex::new((session, Leftover::default()));
        Ok(Self {
            main,
            incoming,
            back: OnceLock::new(),
            pins_all: reply.pin_all,
            has_begun_phases: AtomicBool::new(false),
            is_reading_over: AtomicBool::new(false),
        })
    }

    /// Accepts a request as the return path. Returns false for a second request, which is rejected. The source
    /// cannot write memory through this connection, even while it is being accepted.
    ///
    /// # Errors
    /// [`StreamError::Rdma`] if the connection cannot be established.
    pub fn accept_return_path(
        &self,
        request: Box<dyn Request>,
        reply: &ConnectReply,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<bool, StreamError> {
        if self.back.get().is_some() {
            request.reject(&[])?;
            return Ok(false);
        }
        let mut commander = Commander::new();
        let attributes = sizes(0).attributes().apart();
        let endpoint = accept(request, &attributes, reply, commander.starting(), limit, cancel)?;
        Ok(self.back.set(Writer::new(endpoint, commander)).is_ok())
    }

    /// Begins a phase after the decoder has read a hook of RAM. Bytes of the stream after the hook are kept.
    ///
    /// # Errors
    /// [`StreamError::Protocol`] if a phase is already open.
    pub fn begin_phase(&self) -> Result<(), StreamError> {
        self.has_begun_phases.store(true, Ordering::SeqCst);
        self.incoming.lock().0.hook().map_err(broken)
    }

    /// Invites the next command of the phase, and waits for it. Returns the command's kind and its message.
    ///
    /// # Errors
    /// [`StreamError::Quiet`] if no command arrived within the limit: call again. [`StreamError::Protocol`] for
    /// a message that is not allowed in a phase.
    pub fn next_command(&self, limit: Option<Duration>) -> Result<(Arrival, Vec<u8>), StreamError> {
        let (session, _) = &mut *self.incoming.lock();
        self.next_message(session, Patience::new(limit))
    }

    /// Answers the last command. `message` is the whole answer.
    ///
    /// # Errors
    /// [`StreamError::Protocol`] if another answer is due, or none.
    pub fn answer(
        &self,
        kind: MessageType,
        message: &[u8],
        limit: Option<Duration>,
    ) -> Result<(), StreamError> {
        let sending = self.incoming.lock().0.answer(kind).map_err(broken)?;
        send(&self.main, sending, &[message], Patience::new(limit))
    }

    /// Removes the source's right to write. When this returns, no memory of this side is written over this
    /// connection any more. The stream continues. If the connection has ended, the received rest can still be
    /// read.
    ///
    /// # Errors
    /// As [`Endpoint::end_remote_writes`]: memory is not written any more, but the connection is closed.
    pub fn end_remote_writes(&self) -> Result<(), StreamError> {
        Ok(self.main.end_remote_writes()?)
    }

    /// Ends both connections and destroys their queue pairs. When this returns, no memory of this side is
    /// written any more.
    pub fn destroy(&self) {
        self.shutdown();
        self.main.connection().destroy();
        if let Some(back) = self.back.get() {
            back.endpoint.connection().destroy();
        }
    }

    /// Whether the source has opened the return path.
    pub fn has_return_path(&self) -> bool {
        self.back.get().is_some()
    }

    /// Whether the stream has reached a hook.
    pub fn has_begun_phases(&self) -> bool {
        self.has_begun_phases.load(Ordering::SeqCst)
    }

    /// Whether all memory must be registered when the source requests the blocks.
    pub fn pins_all(&self) -> bool {
        self.pins_all
    }

    /// Sends the source an error, if the source still receives.
    pub fn say_error(&self) {
        let may_say = self.incoming.lock().0.say_error().is_ok();
        if may_say {
            say_error(&self.main);
        }
    }

    /// The main connection's queue pair and buffers.
    pub fn main(&self) -> &Endpoint {
        &self.main
    }

    /// The return path's queue pair and buffers, if it is open.
    pub fn back(&self) -> Option<&Endpoint> {
        self.back.get().map(|back| &back.endpoint)
    }

    fn next_message(
        &self,
        session: &mut DestinationSession,
        patience: Patience,
    ) -> Result<(Arrival, Vec<u8>), StreamError> {
        if session.may_invite() {
            let ready = empty(MessageType::Ready)?;
            let sending = session.invite().map_err(broken)?;
            send(&self.main, sending, &[&ready], patience)?;
        }
        let message = receive(&self.main, patience)?;
        let header = Header::decode(&message).map_err(broken)?;
        match session.received(header.kind).map_err(broken)? {
            Arrival::Failed => Err(StreamFailure::PeerFailed.into()),
            arrival => Ok((arrival, message)),
        }
    }

    fn next_bytes(&self, to: &mut [u8], patience: Patience) -> Result<usize, StreamError> {
        let (session, leftover) = &mut *self.incoming.lock();
        if leftover.is_empty() {
            // While a phase is open, the state machine refuses stream data.
            let (_, message) = self.next_message(session, patience)?;
            leftover.keep(message);
        }
        Ok(leftover.take(to))
    }
}

/// Accepts one connection, after posting its first receives.
fn accept(
    request: Box<dyn Request>,
    attributes: &QueuePairAttributes,
    reply: &ConnectReply,
    receives: usize,
    limit: Duration,
    cancel: &CancelFlag,
) -> Result<Endpoint, StreamError> {
    let endpoint = Endpoint::new(request.open(attributes)?, &sizes(0))?;
    endpoint.post_receives(receives)?;
    endpoint.connection().establish(&ConnectParameters::accept(&reply.to_bytes()), limit, cancel)?;
    Ok(endpoint)
}

impl ByteStream for DestinationStream {
    fn read(&self, to: &mut [u8], limit: Option<Duration>) -> Result<usize, StreamError> {
        let read = self.next_bytes(to, Patience::new(limit));
        or_end(read, self.is_reading_over.load(Ordering::SeqCst))
    }

    fn write(&self, from: &[u8], limit: Option<Duration>) -> Result<usize, StreamError> {
        self.back.get().ok_or(StreamFailure::NoReturnPath)?.write(from, limit)
    }

    fn finish_writing(&self) -> Result<(), StreamError> {
        self.back.get().map_or(Ok(()), |back| back.finish(LAST_WORDS))
    }

    fn finish_reading(&self) {
        self.is_reading_over.store(true, Ordering::SeqCst);
        self.main.finish_receiving();
    }

    fn shutdown(&self) {
        self.main.shutdown();
        if let Some(back) = self.back.get() {
            back.endpoint.shutdown();
        }
    }

    fn peer_has_closed(&self) -> bool {
        self.main.connection().end().is_some()
    }

    fn unsent_bytes(&self) -> u64 {
        self.back.get().map_or(0, |back| back.endpoint.bytes_in_flight())
    }
}
