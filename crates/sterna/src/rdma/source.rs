//! The source's end of the stream over RDMA.

use std::net::SocketAddr;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sterna_transport::rdma::{ConnectParameters, Endpoint, Fabric, RdmaError, Write};
use sterna_transport::{ByteStream, CancelFlag, StreamError};
use sterna_wire::rdma::session::{Command, Heard, Listener, Peer, SourceSession};
use sterna_wire::rdma::{ConnectReply, ConnectRequest, Header, Message};

use super::commands::{Patience, StreamFailure, broken, receive, say_error, send};
use super::return_path::Reader;
use super::sizes::{FILE_BYTES, LAST_WORDS, sizes};

/// Writes the stream on the main connection, and the destination's memory. Reads the return path.
#[derive(Debug)]
pub struct SourceStream {
    main: Endpoint,
    /// Locked from the READY to the answer of one command.
    turn: Mutex<()>,
    session: Mutex<SourceSession>,
    back: Option<Reader>,
    /// Whether reading has ended. Without a return path, a read waits only for this.
    is_over: (Mutex<bool>, Condvar),
}

/// The result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Written {
    /// The command was sent, and it has no answer.
    Sent,
    /// The whole message that answers the command.
    Answer(Vec<u8>),
}

impl SourceStream {
    /// Connects to a destination: the main connection, and the return path if `back` is given. Their private
    /// data are `main` and `back`. Returns the destination's reply on the main connection. `writes`: most
    /// writes in flight.
    ///
    /// # Errors
    /// [`StreamError::Rdma`]; [`StreamError::Protocol`] if a reply breaks its format.
    pub fn connect(
        fabric: &dyn Fabric,
        to: SocketAddr,
        (main, back): (&ConnectRequest, Option<&ConnectRequest>),
        writes: u32,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<(Self, ConnectReply), StreamError> {
        let mut session = SourceSession::new(Peer::Qemu);
        let (endpoint, reply) = dial(fabric, to, main, writes, session.starting(), limit, cancel)?;
        if reply.introduction.is_some() {
            session.met(Peer::Sterna);
        }
        let back = match back {
            None => None,
            Some(request) => {
                let mut listener = match reply.introduction {
                    Some(_) => Listener::of_return_path(),
                    None => Listener::of_qemus_return_path(),
                };
                let (endpoint, _) = dial(fabric, to, request, 0, listener.starting(), limit, cancel)?;
                Some(Reader::new(endpoint, listener))
            }
        };
        let (turn, session, is_over) = (Mutex::default(), Mutex::new(session), Default::default());
        Ok((Self { main: endpoint, turn, session, back, is_over }, reply))
    }

    /// Writes bytes of the stream that end with a hook of RAM, and opens a phase. Until [`Command::Finished`]
    /// no stream data may be written.
    ///
    /// # Errors
    /// [`StreamError::Quiet`] if no part of the last message was sent. This is possible only before the first.
    pub fn begin_phase(&self, bytes: &[u8], limit: Option<Duration>) -> Result<(), StreamError> {
        let mut left = bytes;
        while left.len() > FILE_BYTES {
            left = &left[self.write(left, limit)?..];
        }
        self.file(left, Some(left.len()), limit)
    }

    /// Sends a command of a phase. `message` is the whole command. Waits for the READY before it and for its
    /// answer.
    ///
    /// # Errors
    /// [`StreamError::Quiet`] if the command was not sent yet. A missing answer is a [`StreamError::Rdma`].
    /// [`StreamError::Protocol`] also for a command that is not allowed here.
    pub fn command(
        &self,
        command: Command,
        message: &[u8],
        limit: Option<Duration>,
    ) -> Result<Written, StreamError> {
        let patience = Patience::new(limit);
        let _turn = self.turn.lock();
        self.send_command(command, &[message], patience)?;
        if command.kind().answer().is_none() {
            return Ok(Written::Sent);
        }
        loop {
            let message = receive(&self.main, Patience::new(limit)).map_err(|error| match error {
                // The command was sent and must not be repeated, so `Quiet` would mislead the caller.
                StreamError::Quiet => StreamError::Rdma(RdmaError::TimedOut {
                    what: "waiting for an answer from",
                    address: self.main.connection().peer().to_string(),
                    after: limit.unwrap_or_default(),
                }),
                other => other,
            })?;
            if let Heard::Answer(_) = self.hear(&message)? {
                return Ok(Written::Answer(message));
            }
        }
    }

    /// Posts writes into the destination's memory, in a phase. They may be incomplete when this returns. Only
    /// one thread at a time may post and flush.
    ///
    /// # Errors
    /// As [`Endpoint::write`]; [`StreamError::Protocol`] outside of a phase.
    pub fn write_memory(&self, writes: &[Write], limit: Option<Duration>) -> Result<(), StreamError> {
        let mut session = self.session.lock();
        writes.iter().try_for_each(|_| session.write()).map_err(broken)?;
        drop(session);
        Ok(self.main.write(writes, limit)?)
    }

    /// Number of writes that were completed since the last call. Does not wait.
    ///
    /// # Errors
    /// As [`Endpoint::reap`].
    pub fn completed_writes(&self) -> Result<usize, StreamError> {
        self.main.reap()?;
        self.count_completed()
    }

    /// Waits until at most `most` writes are in flight. Returns how many were completed since the last call.
    ///
    /// # Errors
    /// As [`Endpoint::wait_for_writes`].
    pub fn wait_for_writes(&self, most: usize, limit: Option<Duration>) -> Result<usize, StreamError> {
        self.main.wait_for_writes(most, limit)?;
        self.count_completed()
    }

    fn count_completed(&self) -> Result<usize, StreamError> {
        let mut session = self.session.lock();
        let completed = session.writes_in_flight().saturating_sub(self.main.writes_in_flight());
        session.completed(completed).map_err(broken)?;
        Ok(completed)
    }

    /// Waits until all posted memory writes are complete.
    ///
    /// # Errors
    /// As [`Endpoint::flush`].
    pub fn flush_memory(&self, limit: Option<Duration>) -> Result<(), StreamError> {
        let posted = self.session.lock().writes_in_flight();
        self.main.flush(limit)?;
        self.session.lock().completed(posted).map_err(broken)
    }

    /// Waits until all written data has reached the destination.
    ///
    /// # Errors
    /// As [`Endpoint::flush`].
    pub fn flush(&self, limit: Option<Duration>) -> Result<(), StreamError> {
        Ok(self.main.flush(limit)?)
    }

    /// Destroys the queue pairs. When this returns, no adapter reads memory for them any more. Data that was
    /// written and not flushed is lost.
    pub fn destroy(&self) {
        self.shutdown();
        let back = self.back.as_ref().map(|back| &back.endpoint);
        std::iter::once(&self.main).chain(back).for_each(|endpoint| endpoint.connection().destroy());
    }

    /// Sends the destination an error, if the destination still receives.
    pub fn say_error(&self) {
        let may_say = self.session.lock().say_error().is_ok();
        if may_say {
            say_error(&self.main);
        }
    }

    /// The main connection's queue pair and buffers.
    pub fn main(&self) -> &Endpoint {
        &self.main
    }

    /// The return path's queue pair and buffers, if there is one.
    pub fn back(&self) -> Option<&Endpoint> {
        self.back.as_ref().map(|back| &back.endpoint)
    }

    fn file(
        &self,
        bytes: &[u8],
        hook_ends_at: Option<usize>,
        limit: Option<Duration>,
    ) -> Result<(), StreamError> {
        let header = Header::file(bytes.len()).map_err(broken)?.to_bytes();
        let command = Command::File { bytes: bytes.len(), hook_ends_at };
        let _turn = self.turn.lock();
        self.send_command(command, &[&header, bytes], Patience::new(limit))
    }

    /// Waits for a READY, and sends the command.
    fn send_command(&self, command: Command, parts: &[&[u8]], patience: Patience) -> Result<(), StreamError> {
        while !self.session.lock().may_send() {
            let message = receive(&self.main, patience)?;
            self.hear(&message)?;
        }
        let sending = self.session.lock().send(command).map_err(broken)?;
        send(&self.main, sending, parts, patience)
    }

    fn hear(&self, message: &[u8]) -> Result<Heard, StreamError> {
        let message = Message::decode(message).map_err(broken)?;
        match self.session.lock().received(&message).map_err(broken)? {
            Heard::Failed => Err(StreamFailure::PeerFailed.into()),
            heard => Ok(heard),
        }
    }
}

/// Opens one connection, after posting its first receives. Returns the destination's reply as well.
fn dial(
    fabric: &dyn Fabric,
    to: SocketAddr,
    request: &ConnectRequest,
    writes: u32,
    receives: usize,
    limit: Duration,
    cancel: &CancelFlag,
) -> Result<(Endpoint, ConnectReply), StreamError> {
    let sizes = sizes(writes);
    let connection = fabric.resolve(to, limit, cancel)?.open(&sizes.attributes())?;
    let endpoint = Endpoint::new(connection, &sizes)?;
    endpoint.post_receives(receives)?;
    let private_data = request.to_bytes();
    let reply = endpoint.connection().establish(&ConnectParameters::connect(&private_data), limit, cancel)?;
    let reply = ConnectReply::decode(&reply, request).map_err(broken)?;
    Ok((endpoint, reply))
}

impl ByteStream for SourceStream {
    fn read(&self, to: &mut [u8], limit: Option<Duration>) -> Result<usize, StreamError> {
        if let Some(back) = &self.back {
            return back.read(to, limit);
        }
        // Without a return path no data arrives, so this only waits for the end.
        let mut is_over = self.is_over.0.lock();
        while !*is_over {
            match limit {
                None => self.is_over.1.wait(&mut is_over),
                Some(limit) if self.is_over.1.wait_for(&mut is_over, limit).timed_out() => {
                    return Err(StreamError::Quiet);
                }
                Some(_) => {}
            }
        }
        Ok(0)
    }

    fn write(&self, from: &[u8], limit: Option<Duration>) -> Result<usize, StreamError> {
        let from = &from[..from.len().min(FILE_BYTES)];
        self.file(from, None, limit)?;
        Ok(from.len())
    }

    fn finish_writing(&self) -> Result<(), StreamError> {
        self.session.lock().finish().map_err(broken)?;
        let flushed = self.main.flush(LAST_WORDS);
        self.main.connection().disconnect();
        Ok(flushed?)
    }

    fn finish_reading(&self) {
        *self.is_over.0.lock() = true;
        self.is_over.1.notify_all();
        if let Some(back) = &self.back {
            back.finish();
        }
    }

    fn shutdown(&self) {
        self.main.shutdown();
        if let Some(back) = &self.back {
            back.endpoint.shutdown();
        }
        self.finish_reading();
    }

    fn peer_has_closed(&self) -> bool {
        let back = self.back.as_ref().map(|back| &back.endpoint);
        std::iter::once(&self.main).chain(back).any(|endpoint| endpoint.connection().end().is_some())
    }

    fn unsent_bytes(&self) -> u64 {
        self.main.bytes_in_flight()
    }
}

impl Drop for SourceStream {
    fn drop(&mut self) {
        // As with a socket, written data still arrives after the drop. After a shutdown the flush returns
        // without waiting.
        let _ = self.main.flush(LAST_WORDS);
    }
}

impl Written {
    /// The answer's message, if the command has one.
    pub fn answer(&self) -> Option<&[u8]> {
        match self {
            Written::Sent => None,
            Written::Answer(message) => Some(message),
        }
    }
}
