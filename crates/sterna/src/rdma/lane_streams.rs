//! A lane between two Sterna processes (`specs/rdma.md §9`): a one-way stream of packets on a separate
//! connection. Pages are written before the packet that names them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sterna_transport::rdma::{ConnectParameters, Endpoint, EndpointSizes, Fabric, Request, Write};
use sterna_transport::{ByteStream, CancelFlag, StreamError};
use sterna_wire::rdma::session::{Credit, LaneDestination, LaneSource};
use sterna_wire::rdma::{ConnectReply, ConnectRequest, Header, MessageType};

use super::commands::{Patience, StreamFailure, broken, or_end, receive, send};
use super::leftover::Leftover;
use super::sizes::LAST_WORDS;

/// Most bytes of the stream in one message of a lane.
const MOST_BYTES: usize = LaneSource::MESSAGE_BYTES - Header::BYTES;
/// Most messages in flight before the next one waits for a buffer.
const SENDS: u32 = 8;

/// The source's end of a lane: writes packets, and before each packet the pages that it names.
#[derive(Debug)]
pub struct LaneSourceStream {
    endpoint: Endpoint,
    session: Mutex<LaneSource>,
    /// Writes that were posted and are not known to be complete.
    open_writes: AtomicUsize,
    is_over: (Mutex<bool>, Condvar),
}

impl LaneSourceStream {
    /// Connects to a destination that has accepted the main connection. `writes`: most writes in flight.
    ///
    /// # Errors
    /// [`StreamError::Rdma`]; [`StreamError::Protocol`] for a reply that is not a Sterna's, or breaks its
    /// format.
    pub fn connect(
        fabric: &dyn Fabric,
        to: SocketAddr,
        request: &ConnectRequest,
        writes: u32,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Self, StreamError> {
        let mut session = LaneSource::new();
        let sizes = sizes(LaneSource::RECEIVES, SENDS).with_writes(writes);
        let endpoint = Endpoint::new(fabric.resolve(to, limit, cancel)?.open(&sizes.attributes())?, &sizes)?;
        endpoint.post_receives(session.starting())?;
        let private_data = request.to_bytes();
        let parameters = ConnectParameters::connect(&private_data);
        let reply = endpoint.connection().establish(&parameters, limit, cancel)?;
        let reply = ConnectReply::decode(&reply, request).map_err(broken)?;
        if reply.introduction.is_none() {
            return Err(StreamFailure::NotASterna.into());
        }
        Ok(Self {
            endpoint,
            session: Mutex::new(session),
            open_writes: AtomicUsize::new(0),
            is_over: Default::default(),
        })
    }

    /// Posts writes into the destination's memory. Stream data that is written afterwards arrives after them.
    ///
    /// # Errors
    /// As [`Endpoint::write`].
    pub fn write_memory(&self, writes: &[Write], limit: Option<Duration>) -> Result<(), StreamError> {
        self.open_writes.fetch_add(writes.len(), Ordering::Relaxed);
        Ok(self.endpoint.write(writes, limit)?)
    }

    /// Number of writes that were completed since the last call. Writes complete in the order of posting.
    ///
    /// # Errors
    /// As [`Endpoint::reap`].
    pub fn completed_writes(&self) -> Result<usize, StreamError> {
        self.endpoint.reap()?;
        Ok(self.count_completed())
    }

    /// Waits until at most `most` writes are in flight. Returns how many were completed since the last call.
    ///
    /// # Errors
    /// As [`Endpoint::wait_for_writes`].
    pub fn wait_for_writes(&self, most: usize, limit: Option<Duration>) -> Result<usize, StreamError> {
        self.endpoint.wait_for_writes(most, limit)?;
        Ok(self.count_completed())
    }

    fn count_completed(&self) -> usize {
        let in_flight = self.endpoint.writes_in_flight();
        self.open_writes.swap(in_flight, Ordering::Relaxed).saturating_sub(in_flight)
    }

    /// Waits until all posted memory writes and stream data are complete: they are in the destination, and the
    /// adapter no longer reads pages of this side.
    ///
    /// # Errors
    /// As [`Endpoint::flush`].
    pub fn flush(&self, limit: Option<Duration>) -> Result<(), StreamError> {
        Ok(self.endpoint.flush(limit)?)
    }

    /// Destroys the queue pair. When this returns, the adapter reads no memory for this lane any more.
    pub fn destroy(&self) {
        self.endpoint.shutdown();
        self.endpoint.connection().destroy();
    }

    /// The queue pair and the buffers of the lane's connection.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Waits until the lane has credit for a message.
    fn wait_for_credit(&self, session: &mut LaneSource, patience: Patience) -> Result<(), StreamError> {
        while !session.may_send() {
            let message = receive(&self.endpoint, patience)?;
            let header = Header::decode(&message).map_err(broken)?;
            if session.received(header).map_err(broken)? == Credit::Failed {
                return Err(StreamFailure::PeerFailed.into());
            }
        }
        Ok(())
    }
}

impl ByteStream for LaneSourceStream {
    /// A lane carries no data to the source, so this only waits for the end.
    fn read(&self, _to: &mut [u8], limit: Option<Duration>) -> Result<usize, StreamError> {
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
        let from = &from[..from.len().min(MOST_BYTES)];
        let patience = Patience::new(limit);
        // Locked until the message is sent, so that messages are sent in the order of their credit.
        let mut session = self.session.lock();
        self.wait_for_credit(&mut session, patience)?;
        let header = Header::file(from.len()).map_err(broken)?.to_bytes();
        let sending = session.send().map_err(broken)?;
        send(&self.endpoint, sending, &[&header, from], patience)?;
        Ok(from.len())
    }

    fn finish_writing(&self) -> Result<(), StreamError> {
        self.session.lock().finish();
        let flushed = self.endpoint.flush(LAST_WORDS);
        self.endpoint.connection().disconnect();
        Ok(flushed?)
    }

    fn finish_reading(&self) {
        *self.is_over.0.lock() = true;
        self.is_over.1.notify_all();
    }

    fn shutdown(&self) {
        self.endpoint.shutdown();
        self.finish_reading();
    }

    fn peer_has_closed(&self) -> bool {
        self.endpoint.connection().end().is_some()
    }

    fn unsent_bytes(&self) -> u64 {
        self.endpoint.bytes_in_flight()
    }
}

impl Drop for LaneSourceStream {
    fn drop(&mut self) {
        // As with a socket, written data still arrives after the drop. After a shutdown the flush returns
        // without waiting.
        let _ = self.endpoint.flush(LAST_WORDS);
    }
}

/// The destination's end of a lane: reads packets.
#[derive(Debug)]
pub struct LaneDestinationStream {
    endpoint: Endpoint,
    incoming: Mutex<(LaneDestination, Leftover)>,
    is_reading_over: AtomicBool,
}

impl LaneDestinationStream {
    /// Accepts a request as a lane.
    ///
    /// # Errors
    /// [`StreamError::Rdma`] if the connection cannot be established.
    pub fn accept(
        request: Box<dyn Request>,
        reply: &ConnectReply,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Self, StreamError> {
        let mut session = LaneDestination::new();
        let sizes = sizes(LaneDestination::RECEIVES, 2);
        let attributes = sizes.attributes().with_remote_write();
        let endpoint = Endpoint::new(request.open(&attributes)?, &sizes)?;
        endpoint.post_receives(session.starting())?;
        endpoint.connection().establish(&ConnectParameters::accept(&reply.to_bytes()), limit, cancel)?;
        let incoming = Mutex::new((session, Leftover::default()));
        Ok(Self { endpoint, incoming, is_reading_over: AtomicBool::new(false) })
    }

    /// Removes the source's right to write over this lane. When this returns, no memory of this side is written
    /// over it any more. The stream continues. If the lane has ended, the received rest can still be read.
    ///
    /// # Errors
    /// As [`Endpoint::end_remote_writes`]: memory is not written any more, but the lane is closed.
    pub fn end_remote_writes(&self) -> Result<(), StreamError> {
        Ok(self.endpoint.end_remote_writes()?)
    }

    /// Destroys the queue pair. When this returns, no memory is written over this lane any more.
    pub fn destroy(&self) {
        self.endpoint.shutdown();
        self.endpoint.connection().destroy();
    }

    /// The queue pair and the buffers of the lane's connection.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    fn next_bytes(&self, to: &mut [u8], patience: Patience) -> Result<usize, StreamError> {
        let (session, leftover) = &mut *self.incoming.lock();
        if leftover.is_empty() {
            self.give_credit(session, patience)?;
            let message = receive(&self.endpoint, patience)?;
            let kind = Header::decode(&message).map_err(broken)?.kind;
            session.received(kind).map_err(broken)?;
            if kind == MessageType::Error {
                return Err(StreamFailure::PeerFailed.into());
            }
            leftover.keep(message);
        }
        Ok(leftover.take(to))
    }

    fn give_credit(&self, session: &mut LaneDestination, patience: Patience) -> Result<(), StreamError> {
        if session.due().is_none() {
            return Ok(());
        }
        let (repeat, sending) = session.invite().map_err(broken)?;
        let ready = Header { kind: MessageType::Ready, length: 0, repeat }.to_bytes();
        let sent = send(&self.endpoint, sending, &[&ready], patience);
        match sent {
            // The source may have ended the lane. Its earlier messages are read first.
            Err(StreamError::Rdma(error)) if error.is_end() => Ok(()),
            other => other,
        }
    }
}

impl ByteStream for LaneDestinationStream {
    fn read(&self, to: &mut [u8], limit: Option<Duration>) -> Result<usize, StreamError> {
        let read = self.next_bytes(to, Patience::new(limit));
        or_end(read, self.is_reading_over.load(Ordering::SeqCst))
    }

    /// A lane carries no data to the source.
    fn write(&self, _from: &[u8], _limit: Option<Duration>) -> Result<usize, StreamError> {
        Err(StreamFailure::NoReturnPath.into())
    }

    fn finish_writing(&self) -> Result<(), StreamError> {
        Ok(())
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
        0
    }
}

fn sizes(receives: usize, sends: u32) -> EndpointSizes {
    EndpointSizes::messages(LaneSource::MESSAGE_BYTES as u32, receives as u32, sends)
}
