//! Sending and receiving of RDMA messages, as both sides of the stream need it.

use std::time::{Duration, Instant};

use sterna_transport::StreamError;
use sterna_transport::rdma::{CompletionStatus, Endpoint, Event, RdmaError};
use sterna_wire::rdma::session::Sending;
use sterna_wire::rdma::{MessageType, encode_empty};
use sterna_wire::{Fault, WireError};

/// A protocol failure of the stream over RDMA. The connection itself may still work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamFailure {
    /// A message violated a rule of the specification.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The peer sent ERROR.
    #[error("the peer says that it has failed (ERROR); its log says why")]
    PeerFailed,
    /// The destination has no connection for the return path.
    #[error(
        "there is no connection for the return path: the source opened one connection only; give both sides the \
         capability return-path, or neither"
    )]
    NoReturnPath,
    /// A lane was requested from a destination that is not a Sterna.
    #[error(
        "the destination took a lane and did not answer as a Sterna does: multifd together with RDMA needs a Sterna on both \
         sides; switch multifd off"
    )]
    NotASterna,
}

impl StreamFailure {
    /// The side that caused the failure, or `None` if only the peer's log can say.
    pub fn fault(&self) -> Option<Fault> {
        match self {
            StreamFailure::Wire(error) => Some(error.fault),
            StreamFailure::PeerFailed => None,
            StreamFailure::NoReturnPath | StreamFailure::NotASterna => Some(Fault::PeerIncompatible),
        }
    }
}

impl From<StreamFailure> for StreamError {
    fn from(failure: StreamFailure) -> Self {
        StreamError::Protocol(Box::new(failure))
    }
}

pub(super) fn broken(error: WireError) -> StreamError {
    StreamFailure::Wire(error).into()
}

/// The time limit of a call that consists of several steps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    limit: Option<Duration>,
    until: Option<Instant>,
}

impl Patience {
    pub(super) fn new(limit: Option<Duration>) -> Self {
        Self { limit, until: limit.and_then(|limit| Instant::now().checked_add(limit)) }
    }

    /// The limit of a single step.
    pub(super) fn limit(&self) -> Option<Duration> {
        self.limit
    }

    fn left(&self) -> Option<Duration> {
        self.until.map(|until| until.saturating_duration_since(Instant::now()))
    }
}

/// Receives the next message, or returns [`StreamError::Quiet`] when the time is over.
pub(super) fn receive(endpoint: &Endpoint, patience: Patience) -> Result<Vec<u8>, StreamError> {
    endpoint.receive(patience.left())?.ok_or(StreamError::Quiet)
}

/// Posts the receives that the state machine requires for a message, and sends the message.
pub(super) fn send(
    endpoint: &Endpoint,
    sending: Sending,
    parts: &[&[u8]],
    patience: Patience,
) -> Result<(), StreamError> {
    endpoint.post_receives(sending.receives)?;
    Ok(endpoint.send(parts, patience.limit())?)
}

/// Encodes a message without payload.
pub(super) fn empty(kind: MessageType) -> Result<Vec<u8>, StreamError> {
    let mut message = Vec::new();
    encode_empty(kind, 1, &mut message).map_err(broken)?;
    Ok(message)
}

/// Sends ERROR. If the peer is gone or has no receive posted, it learns the failure from the disconnect.
pub(super) fn say_error(endpoint: &Endpoint) {
    const LAST_WORD: Option<Duration> = Some(Duration::from_millis(200));
    let Ok(message) = empty(MessageType::Error) else { return };
    let sent = endpoint.send(&[&message], LAST_WORD).and_then(|()| endpoint.flush(LAST_WORD));
    if let Err(error) = sent {
        tracing::debug!(%error, "the peer does not hear that this side has failed");
    }
}

/// Reports the end of the connection, or of reading on this side, as the end of the stream.
pub(super) fn or_end(read: Result<usize, StreamError>, is_reading_over: bool) -> Result<usize, StreamError> {
    match read {
        Err(StreamError::Rdma(error)) if is_end_of_reading(&error) => Ok(0),
        Err(StreamError::Rdma(RdmaError::Cancelled { .. })) if is_reading_over => Ok(0),
        other => other,
    }
}

/// Whether the error is the end of the connection. An adapter flushes the posted receives before it reports the
/// reason.
fn is_end_of_reading(error: &RdmaError) -> bool {
    match error {
        RdmaError::Ended { event, .. } => event.as_ref().is_some_and(Event::is_end),
        RdmaError::Failed { operation, status, .. } => {
            *operation == "a receive" && *status == CompletionStatus::WorkRequestFlushed
        }
        _ => false,
    }
}
