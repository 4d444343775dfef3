//! The question after a lost acknowledgement, and its answer (`specs/rdma.md §10`). Both sides take turns on
//! one connection.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sterna_transport::rdma::{
    ConnectParameters, Endpoint, EndpointSizes, Fabric, QueuePairAttributes, Request,
};
use sterna_transport::{ByteStream, CancelFlag, StreamError};
use sterna_wire::WireError;
use sterna_wire::rdma::{ConnectReply, ConnectRequest, Header, Message, MessageType};

use super::commands::{Patience, StreamFailure, broken, empty, or_end, receive};
use super::leftover::Leftover;
use super::sizes::LAST_WORDS;

/// Bytes of a message. Question and answer are much shorter.
const MESSAGE_BYTES: usize = 4096;
/// Posted receives: an invited FILE, a READY that may arrive at any time, and one more, so that a surplus
/// message is reported.
const RECEIVES: u32 = 3;
const SENDS: u32 = 2;

/// Either end of the connection. The source writes first.
#[derive(Debug)]
pub struct QuestionStream {
    endpoint: Endpoint,
    turns: Mutex<Turns>,
    is_reading_over: AtomicBool,
}

#[derive(Debug, Default)]
struct Turns {
    /// The peer has sent a READY that no message has used.
    may_send: bool,
    /// This side has sent a READY that is not answered yet.
    has_invited: bool,
    leftover: Leftover,
}

impl QuestionStream {
    /// Connects to the destination, as the asking side.
    ///
    /// # Errors
    /// [`StreamError::Rdma`]; [`StreamError::Protocol`] for a reply that is not a Sterna's, or breaks its
    /// format.
    pub fn ask(
        fabric: &dyn Fabric,
        to: SocketAddr,
        request: &ConnectRequest,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Self, StreamError> {
        let connection = fabric.resolve(to, limit, cancel)?.open(&attributes())?;
        let this = Self::over(Endpoint::new(connection, &sizes())?)?;
        let private_data = request.to_bytes();
        let parameters = ConnectParameters::connect(&private_data);
        let reply = this.endpoint.connection().establish(&parameters, limit, cancel)?;
        let reply = ConnectReply::decode(&reply, request).map_err(broken)?;
        if reply.introduction.is_none() {
            return Err(StreamFailure::NotASterna.into());
        }
        Ok(this)
    }

    /// Accepts a connect request, as the answering side.
    ///
    /// # Errors
    /// [`StreamError::Rdma`] if the connection cannot be established.
    pub fn answer(
        request: Box<dyn Request>,
        reply: &ConnectReply,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Self, StreamError> {
        let this = Self::over(Endpoint::new(request.open(&attributes())?, &sizes())?)?;
        let private_data = reply.to_bytes();
        this.endpoint.connection().establish(&ConnectParameters::accept(&private_data), limit, cancel)?;
        Ok(this)
    }

    fn over(endpoint: Endpoint) -> Result<Self, StreamError> {
        endpoint.post_receives(RECEIVES as usize)?;
        Ok(Self { endpoint, turns: Mutex::default(), is_reading_over: AtomicBool::new(false) })
    }

    fn next_bytes(&self, to: &mut [u8], patience: Patience) -> Result<usize, StreamError> {
        let turns = &mut *self.turns.lock();
        while turns.leftover.is_empty() {
            if !turns.has_invited {
                self.endpoint.send(&[&empty(MessageType::Ready)?], patience.limit())?;
                turns.has_invited = true;
            }
            self.hear(turns, patience)?;
        }
        Ok(turns.leftover.take(to))
    }

    fn file(&self, from: &[u8], patience: Patience) -> Result<usize, StreamError> {
        let turns = &mut *self.turns.lock();
        while !turns.may_send {
            self.hear(turns, patience)?;
        }
        let from = &from[..from.len().min(MESSAGE_BYTES - Header::BYTES)];
        let header = Header::file(from.len()).map_err(broken)?.to_bytes();
        self.endpoint.send(&[&header, from], patience.limit())?;
        turns.may_send = false;
        Ok(from.len())
    }

    /// Receives one message, and checks that it is this message's turn.
    fn hear(&self, turns: &mut Turns, patience: Patience) -> Result<(), StreamError> {
        let message = receive(&self.endpoint, patience)?;
        self.endpoint.post_receives(1)?;
        let kind = Message::decode(&message).map_err(broken)?.kind();
        match kind {
            MessageType::Ready if !turns.may_send => turns.may_send = true,
            MessageType::File if turns.has_invited => {
                turns.has_invited = false;
                turns.leftover.keep(message);
            }
            MessageType::Error => return Err(StreamFailure::PeerFailed.into()),
            kind => {
                let rule =
                    "it is not this message's turn: each FILE answers one READY, and nothing else is sent";
                return Err(broken(WireError::misbehaved(kind.name(), 4, "specs/rdma.md §10", rule)));
            }
        }
        Ok(())
    }
}

/// Neither side writes memory over this connection.
fn attributes() -> QueuePairAttributes {
    sizes().attributes().apart()
}

fn sizes() -> EndpointSizes {
    EndpointSizes::messages(MESSAGE_BYTES as u32, RECEIVES, SENDS)
}

impl ByteStream for QuestionStream {
    fn read(&self, to: &mut [u8], limit: Option<Duration>) -> Result<usize, StreamError> {
        let read = self.next_bytes(to, Patience::new(limit));
        or_end(read, self.is_reading_over.load(Ordering::SeqCst))
    }

    fn write(&self, from: &[u8], limit: Option<Duration>) -> Result<usize, StreamError> {
        self.file(from, Patience::new(limit))
    }

    fn finish_writing(&self) -> Result<(), StreamError> {
        Ok(self.endpoint.flush(LAST_WORDS)?)
    }

    fn finish_reading(&self) {
        self.is_reading_over.store(true, Ordering::SeqCst);
        self.endpoint.finish_receiving();
    }

    fn shutdown(&self) {
        self.endpoint.shutdown();
    }

    fn peer_has_closed(&self) -> bool {
        self.endpoint.connection().end().is_some()
    }

    fn unsent_bytes(&self) -> u64 {
        self.endpoint.bytes_in_flight()
    }
}

impl Drop for QuestionStream {
    fn drop(&mut self) {
        // As with a socket, written data still arrives after the drop. After a shutdown the flush returns
        // without waiting.
        let _ = self.endpoint.flush(LAST_WORDS);
    }
}
