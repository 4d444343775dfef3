//! Both ends of the return path, which carries FILE messages of the destination.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sterna_transport::StreamError;
use sterna_transport::rdma::Endpoint;
use sterna_wire::rdma::session::{Commander, Heard, Listener};
use sterna_wire::rdma::{Header, Message, MessageType};

use super::commands::{Patience, StreamFailure, broken, empty, or_end, receive, send};
use super::leftover::Leftover;
use super::sizes::{FILE_BYTES, LAST_WORDS};

/// The destination's end: it writes.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) endpoint: Endpoint,
    commander: Mutex<Commander>,
}

impl Writer {
    /// Uses an endpoint whose first receives are posted.
    pub(super) fn new(endpoint: Endpoint, commander: Commander) -> Self {
        Self { endpoint, commander: Mutex::new(commander) }
    }

    pub(super) fn write(&self, from: &[u8], limit: Option<Duration>) -> Result<usize, StreamError> {
        let patience = Patience::new(limit);
        let from = &from[..from.len().min(FILE_BYTES)];
        let mut commander = self.commander.lock();
        while !commander.may_send() {
            let message = receive(&self.endpoint, patience)?;
            let kind = Header::decode(&message).map_err(broken)?.kind;
            if commander.received(kind).map_err(broken)? == Heard::Failed {
                return Err(StreamFailure::PeerFailed.into());
            }
        }
        let header = Header::file(from.len()).map_err(broken)?.to_bytes();
        let sending = commander.send(MessageType::File).map_err(broken)?;
        send(&self.endpoint, sending, &[&header, from], patience)?;
        Ok(from.len())
    }

    /// Ends writing: waits at most `limit` until the last byte has arrived, and disconnects.
    pub(super) fn finish(&self, limit: Option<Duration>) -> Result<(), StreamError> {
        self.commander.lock().finish();
        let flushed = self.endpoint.flush(limit);
        self.endpoint.connection().disconnect();
        Ok(flushed?)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // As with a socket, written data still arrives after the drop. After a shutdown the flush returns
        // without waiting.
        let _ = self.endpoint.flush(LAST_WORDS);
    }
}

/// The source's end: it reads.
#[derive(Debug)]
pub(super) struct Reader {
    pub(super) endpoint: Endpoint,
    state: Mutex<(Listener, Leftover)>,
    is_over: AtomicBool,
}

impl Reader {
    /// Uses an endpoint whose first receives are posted.
    pub(super) fn new(endpoint: Endpoint, listener: Listener) -> Self {
        Self { endpoint, state: Mutex::new((listener, Leftover::default())), is_over: AtomicBool::new(false) }
    }

    pub(super) fn read(&self, to: &mut [u8], limit: Option<Duration>) -> Result<usize, StreamError> {
        or_end(self.next(to, Patience::new(limit)), self.is_over.load(Ordering::SeqCst))
    }

    fn next(&self, to: &mut [u8], patience: Patience) -> Result<usize, StreamError> {
        let (listener, leftover) = &mut *self.state.lock();
        if leftover.is_empty() {
            if listener.may_invite() {
                let ready = empty(MessageType::Ready)?;
                let sending = listener.invite().map_err(broken)?;
                send(&self.endpoint, sending, &[&ready], patience)?;
            }
            let message = receive(&self.endpoint, patience)?;
            let decoded = Message::decode(&message).map_err(broken)?;
            listener.received(decoded.kind()).map_err(broken)?;
            match decoded.kind() {
                MessageType::File => leftover.keep(message),
                MessageType::Error => return Err(StreamFailure::PeerFailed.into()),
                // Commands are not allowed on the return path.
                kind => {
                    let rule = "the return path carries FILE messages only";
                    let error =
                        sterna_wire::WireError::misbehaved(kind.name(), 4, "specs/rdma.md §3.4", rule);
                    return Err(broken(error));
                }
            }
        }
        Ok(leftover.take(to))
    }

    pub(super) fn finish(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.endpoint.finish_receiving();
    }
}
