//! A connection over a real adapter, through libibverbs and librdmacm.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use rustix::event::PollFlags;

use super::abi::*;
use super::domain::{Domain, VerbsAdapter};
use super::errno::error;
use super::events::{self, Mailbox};
use super::id::{CmEvent, EventChannel, Id};
use super::queues::{IN_ERROR, Queues};
use crate::cancel::CancelFlag;
use crate::cancel::{Waited, wait_any};
use crate::rdma::adapter::Adapter;
use crate::rdma::connection::{ConnectParameters, Connection, Queue, QueuePairAttributes, Wake};
use crate::rdma::error::{RdmaError, RejectReason};
use crate::rdma::event::Event;
use crate::rdma::fabric::PRIVATE_DATA;
use crate::rdma::memory::Piece;
use crate::rdma::work::{Completion, SendRequest};

/// Time that an adapter may take to flush receives after the end of a connection.
///
/// Soft-RoCE flushes them concurrently with the event.
const FLUSH: Duration = Duration::from_secs(1);

/// Role of this side when the connection is established.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Connects,
    Accepts,
}

#[derive(Debug)]
pub(crate) struct VerbsConnection {
    side: Side,
    peer: SocketAddr,
    /// `None` after [`Connection::destroy`]. Every call holds the read lock while it uses the queues, also while
    /// it waits, and calls no function that takes the lock again.
    queues: RwLock<Option<Queues>>,
    mailbox: Arc<Mailbox>,
    /// Locked by the thread that reads events of the connection manager.
    manager: Mutex<()>,
    /// Dropped, and so destroyed, after its queue pair.
    _id: Arc<Id>,
    channel: Arc<EventChannel>,
    adapter: Arc<VerbsAdapter>,
    /// Whether the peer keeps the right to write after connecting.
    remote_write: bool,
}

impl VerbsConnection {
    /// Allocates the queue pair. The identifier must have its own event channel.
    pub(crate) fn new(
        side: Side,
        peer: SocketAddr,
        id: Id,
        domain: &Arc<Domain>,
        attributes: &QueuePairAttributes,
    ) -> Result<Arc<Self>, RdmaError> {
        let (id, subject) = (Arc::new(id), peer.to_string());
        let domain = match attributes.is_apart {
            true => Domain::new(domain.context().clone())?,
            false => domain.clone(),
        };
        let adapter = Arc::new(VerbsAdapter { domain: domain.clone(), port: id.port_number() });
        let mailbox = Mailbox::new().map_err(|source| error(&subject, "eventfd", source))?;
        let mailbox = Arc::new(mailbox);
        let queues = Queues::new(id.clone(), domain.clone(), attributes, &subject)?;
        domain.context().subscribe(queues.raw(), adapter.port, &mailbox);
        let (queues, channel) = (RwLock::new(Some(queues)), id.channel());
        let (manager, remote_write) = (Mutex::new(()), attributes.remote_write);
        Ok(Arc::new(Self { side, peer, queues, mailbox, manager, _id: id, channel, adapter, remote_write }))
    }

    fn with_queues<T>(&self, body: impl FnOnce(&Queues) -> Result<T, RdmaError>) -> Result<T, RdmaError> {
        match &*self.queues.read() {
            Some(queues) => body(queues),
            None => Err(self.destroyed()),
        }
    }

    fn destroyed(&self) -> RdmaError {
        RdmaError::Ended { peer: self.peer.to_string(), event: None }
    }

    fn error(&self, call: &'static str, source: io::Error) -> RdmaError {
        error(self.peer, call, source)
    }

    /// Processes all available events of the device and the connection manager.
    ///
    /// While a thread establishes the connection, that thread reads the connection manager's events.
    fn take_events(&self) {
        self.adapter.domain.context().dispatch();
        let Some(_manager) = self.manager.try_lock() else { return };
        while let Ok(Some(event)) = self.next_event() {
            self.put(&event);
        }
    }

    /// The next event of the connection manager; `None` if there is none, and after [`Connection::destroy`].
    fn next_event(&self) -> io::Result<Option<CmEvent>> {
        let queues = self.queues.read();
        queues.as_ref().map_or(Ok(None), |queues| queues.next_event(&self.channel))
    }

    fn put(&self, event: &CmEvent) {
        let Some(event) = events::of_manager(event.kind) else { return };
        if event == Event::Disconnected {
            // librdmacm leaves it to the caller to put the queue pair into the error state and to answer the peer.
            self.disconnect_queues();
        }
        self.mailbox.put(event);
    }

    /// Disconnects the queue pair unless it is already destroyed.
    fn disconnect_queues(&self) {
        if let Some(queues) = &*self.queues.read() {
            queues.disconnect();
        }
    }

    /// Revokes the right to write, unless it is wanted.
    ///
    /// Connecting or accepting grants the right to every queue pair, whatever its attributes (specs/rdma.md §11.2).
    fn end_unwanted_writes(&self, queues: &Queues) -> Result<(), RdmaError> {
        if !self.remote_write && !queues.set_remote_write(false)? {
            self.mailbox.put(Event::Fatal(IN_ERROR.to_owned()));
        }
        Ok(())
    }

    /// Adds the connection's end to the error of a request that the adapter refused after it.
    fn posted(&self, posted: Result<(), RdmaError>) -> Result<(), RdmaError> {
        posted.map_err(|error| match error {
            RdmaError::Ended { peer, event: Some(event) } => {
                RdmaError::Ended { peer, event: Some(self.end().unwrap_or(event)) }
            }
            other => other,
        })
    }

    fn begin(&self, queues: &Queues, parameters: &ConnectParameters<'_>) -> Result<(), RdmaError> {
        let (what, limit, call) = match self.side {
            Side::Connects => ("request", PRIVATE_DATA.request, "rdma_connect"),
            Side::Accepts => ("reply", PRIVATE_DATA.reply, "rdma_accept"),
        };
        let data = parameters.private_data;
        if data.len() > limit {
            return Err(RdmaError::PrivateData { what, len: data.len(), limit });
        }
        let mut raw = rdma_conn_param {
            private_data: data.as_ptr().cast(),
            private_data_len: data.len() as u8,
            responder_resources: parameters.responder_resources,
            initiator_depth: parameters.initiator_depth,
            flow_control: 0,
            retry_count: parameters.retry_count,
            rnr_retry_count: parameters.rnr_retry_count,
            srq: 0,
            qp_num: 0,
        };
        let begun = match self.side {
            Side::Connects => queues.connect(&mut raw),
            Side::Accepts => queues.accept(&mut raw),
        };
        begun.map_err(|source| self.error(call, source))?;
        match self.side {
            // The queue pair is ready now, before the peer confirms, and the peer may never confirm.
            Side::Accepts => self.end_unwanted_writes(queues),
            Side::Connects => Ok(()),
        }
    }

    /// The result that an event means for `establish`; `None` if it must continue to wait.
    fn outcome(&self, event: CmEvent) -> Option<Result<Vec<u8>, RdmaError>> {
        let status = io::Error::from_raw_os_error(event.status.saturating_abs());
        let call = if self.side == Side::Connects { "rdma_connect" } else { "rdma_accept" };
        match event.kind {
            RDMA_CM_EVENT_ESTABLISHED => Some(Ok(event.private_data)),
            RDMA_CM_EVENT_REJECTED => Some(Err(RdmaError::Rejected {
                peer: self.peer.to_string(),
                reason: RejectReason(event.status),
                private_data: event.private_data,
            })),
            RDMA_CM_EVENT_CONNECT_ERROR | RDMA_CM_EVENT_UNREACHABLE => Some(Err(self.error(call, status))),
            kind => {
                let event = events::of_manager(kind).filter(Event::is_end)?;
                Some(Err(RdmaError::Ended { peer: self.peer.to_string(), event: Some(event) }))
            }
        }
    }
}

impl Connection for VerbsConnection {
    fn adapter(&self) -> Arc<dyn Adapter> {
        self.adapter.clone()
    }

    fn peer(&self) -> SocketAddr {
        self.peer
    }

    fn establish(
        &self,
        parameters: &ConnectParameters<'_>,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Vec<u8>, RdmaError> {
        let _manager = self.manager.lock();
        self.with_queues(|queues| self.begin(queues, parameters))?;
        let deadline = Instant::now().checked_add(limit);
        loop {
            while let Some(event) =
                self.next_event().map_err(|source| self.error("rdma_get_cm_event", source))?
            {
                if event.kind == RDMA_CM_EVENT_ESTABLISHED {
                    self.with_queues(|queues| {
                        queues.set_connected();
                        match self.side {
                            // librdmacm made the queue pair ready when it returned the event.
                            Side::Connects => self.end_unwanted_writes(queues),
                            Side::Accepts => Ok(()),
                        }
                    })?;
                }
                self.put(&event);
                if let Some(outcome) = self.outcome(event) {
                    let accepts = self.side == Side::Accepts;
                    return outcome.map(|reply| if accepts { Vec::new() } else { reply });
                }
            }
            if self.mailbox.is_destroyed() {
                return Err(self.destroyed());
            }
            let fds = [(self.channel.as_fd(), PollFlags::IN), (self.mailbox.as_fd(), PollFlags::IN)];
            let waited = wait_any(&fds, &[cancel], deadline).map_err(|source| self.error("poll", source))?;
            let (address, after) = (self.peer.to_string(), limit);
            match (waited, self.side) {
                (Waited::Ready, _) => {}
                (Waited::Cancelled, _) => return Err(RdmaError::Cancelled { address }),
                (Waited::TimedOut, Side::Connects) => {
                    return Err(RdmaError::TimedOut { what: "connecting to", address, after });
                }
                (Waited::TimedOut, Side::Accepts) => {
                    return Err(RdmaError::TimedOut { what: "accepting the request of", address, after });
                }
            }
        }
    }

    fn post_receive(&self, id: u64, into: Piece) -> Result<(), RdmaError> {
        self.posted(self.with_queues(|queues| queues.post_receive(id, into)))
    }

    fn post_send(&self, requests: &[SendRequest]) -> Result<(), RdmaError> {
        self.posted(self.with_queues(|queues| queues.post_send(requests)))
    }

    fn poll(&self, queue: Queue, to: &mut Vec<Completion>, most: usize) -> Result<usize, RdmaError> {
        self.with_queues(|queues| queues.poll(queue, to, most))
    }

    fn wait(&self, queue: Queue, deadline: Option<Instant>, cancel: &CancelFlag) -> Result<Wake, RdmaError> {
        let mut flushed_until = None;
        loop {
            let waited = self.with_queues(|queues| {
                if queues.has_completion(queue)? {
                    return Ok(Some(Wake::Completion));
                }
                queues.arm(queue)?;
                // A completion that arrived before the notification was armed causes no notification.
                if queues.has_completion(queue)? {
                    return Ok(Some(Wake::Completion));
                }
                if self.mailbox.is_destroyed() {
                    return Err(self.destroyed());
                }
                let has_ended = self.mailbox.end().is_some();
                let until = has_ended.then(|| *flushed_until.get_or_insert_with(|| Instant::now() + FLUSH));
                if until.is_some_and(|until| Instant::now() >= until || !queues.owes_receives(queue)) {
                    return Ok(Some(Wake::Ended));
                }
                let fds = [
                    (queues.notifications(queue), PollFlags::IN),
                    (self.channel.as_fd(), PollFlags::IN),
                    (self.adapter.domain.context().as_fd(), PollFlags::IN),
                    (self.mailbox.as_fd(), PollFlags::IN),
                ];
                // After the end only completions matter.
                let fds = if has_ended { &fds[..1] } else { &fds };
                let limit = deadline.into_iter().chain(until).min();
                let waited = wait_any(fds, &[cancel], limit).map_err(|source| self.error("poll", source))?;
                queues.take_notifications(queue);
                Ok(match waited {
                    Waited::Ready => None,
                    Waited::Cancelled => Some(Wake::Cancelled),
                    Waited::TimedOut if has_ended => Some(Wake::Ended),
                    Waited::TimedOut => Some(Wake::TimedOut),
                })
            })?;
            if let Some(wake) = waited {
                return Ok(wake);
            }
            self.take_events();
        }
    }

    fn set_remote_write(&self, allowed: bool) -> Result<(), RdmaError> {
        if !self.with_queues(|queues| queues.set_remote_write(allowed))? {
            // If the connection has already ended, the earlier event stays the end.
            self.take_events();
            self.mailbox.put(Event::Fatal(IN_ERROR.to_owned()));
        }
        Ok(())
    }

    fn poll_event(&self) -> Option<Event> {
        self.take_events();
        self.mailbox.take()
    }

    fn end(&self) -> Option<Event> {
        self.take_events();
        self.mailbox.end()
    }

    fn disconnect(&self) {
        // The event is recorded here, because the peer may never answer.
        self.disconnect_queues();
        self.mailbox.put(Event::Disconnected);
    }

    fn destroy(&self) {
        self.mailbox.destroy();
        let mut queues = self.queues.write();
        if let Some(queues) = &*queues {
            queues.disconnect();
            self.mailbox.put(Event::Disconnected);
        }
        // Under the write lock, so no other call uses the queue pair, and none returns before it is destroyed.
        *queues = None;
    }
}

impl Drop for VerbsConnection {
    fn drop(&mut self) {
        self.destroy();
    }
}
