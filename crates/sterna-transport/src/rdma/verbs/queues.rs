//! A queue pair with its completion queues, and the accounting of its requests.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::fs::{OFlags, fcntl_setfl};

use super::abi::*;
use super::domain::Domain;
use super::errno::{error, failed};
use super::id::{CmEvent, EventChannel, Id, of_c};
use crate::rdma::connection::{Queue, QueuePairAttributes};
use crate::rdma::error::RdmaError;
use crate::rdma::event::Event;
use crate::rdma::memory::Piece;
use crate::rdma::work::{Completion, CompletionKind, CompletionStatus, Operation, SendRequest};

/// Reason for the end of a connection whose adapter refuses requests that are otherwise valid.
pub(crate) const IN_ERROR: &str = "the queue pair is in the error state";

/// Maximum number of completions per poll of the adapter.
const BATCH: usize = 32;

/// A queue pair with its completion queues. Dropping it destroys them, and ends all memory access through it.
///
/// librdmacm reads the identifier's queue pair in `rdma_connect`, `rdma_accept`, `rdma_disconnect` and
/// `rdma_get_cm_event` (for a reply, a reject and a failed connection). It takes no lock against
/// `rdma_destroy_qp`, which frees the queue pair. Therefore these calls are methods here: a connection lends its
/// `Queues` under a lock, and drops them under the same lock.
pub(crate) struct Queues {
    id: Arc<Id>,
    domain: Arc<Domain>,
    raw: NonNull<ibv_qp>,
    send: CompletionQueue,
    receive: CompletionQueue,
    sending: Mutex<Sending>,
    receiving: Mutex<Receiving>,
    is_connected: AtomicBool,
    subject: String,
}

/// Accounting of the send queue.
///
/// The adapter gets sequence numbers as request identifiers. A completion finishes all requests up to its number.
struct Sending {
    capacity: usize,
    /// The callers' identifiers of the requests that occupy a slot.
    outstanding: VecDeque<u64>,
    /// Sequence number of the first of these requests.
    first: u64,
    ready: VecDeque<Completion>,
    requests: Vec<ibv_send_wr>,
    pieces: Vec<ibv_sge>,
}

struct Receiving {
    capacity: usize,
    outstanding: usize,
    ready: VecDeque<Completion>,
}

// SAFETY: the pointers in `requests` are used only within a call of `post_send`.
unsafe impl Send for Sending {}
// SAFETY: libibverbs' functions are thread-safe, and the pointers stay valid until `self` is dropped.
unsafe impl Send for Queues {}
// SAFETY: as above.
unsafe impl Sync for Queues {}

impl Queues {
    pub(crate) fn new(
        id: Arc<Id>,
        domain: Arc<Domain>,
        attributes: &QueuePairAttributes,
        subject: &str,
    ) -> Result<Self, RdmaError> {
        let QueuePairAttributes { send_requests, receives, .. } = *attributes;
        let send = CompletionQueue::new(&domain, send_requests)?;
        let receive = CompletionQueue::new(&domain, receives)?;
        let mut wanted = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: send.raw.as_ptr(),
            recv_cq: receive.raw.as_ptr(),
            srq: ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: send_requests,
                max_recv_wr: receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let create = id.library().manager.rdma_create_qp;
        // SAFETY: the identifier is bound to the device of the domain and of both completion queues.
        of_c(unsafe { create(id.raw(), domain.raw(), &raw mut wanted) })
            .map_err(|source| error(subject, "rdma_create_qp", source))?;
        // SAFETY: the call has just set the field, and nothing else writes it.
        let raw = NonNull::new(unsafe { (*id.raw()).qp }).ok_or_else(|| failed(subject, "rdma_create_qp"))?;
        let sending = Sending {
            capacity: send_requests as usize,
            outstanding: VecDeque::new(),
            first: 0,
            ready: VecDeque::new(),
            requests: Vec::new(),
            pieces: Vec::new(),
        };
        let receiving = Receiving { capacity: receives as usize, outstanding: 0, ready: VecDeque::new() };
        Ok(Self {
            id,
            domain,
            raw,
            send,
            receive,
            sending: Mutex::new(sending),
            receiving: Mutex::new(receiving),
            is_connected: AtomicBool::new(false),
            subject: subject.to_owned(),
        })
    }

    pub(crate) fn raw(&self) -> *mut ibv_qp {
        self.raw.as_ptr()
    }

    /// Allows requests to be posted.
    pub(crate) fn set_connected(&self) {
        self.is_connected.store(true, Ordering::Release);
    }

    pub(crate) fn post_receive(&self, id: u64, into: Piece) -> Result<(), RdmaError> {
        let mut receiving = self.receiving.lock();
        if receiving.outstanding == receiving.capacity {
            return Err(self.full("receive", 0));
        }
        let mut piece = sge(into);
        let mut request = ibv_recv_wr {
            wr_id: id,
            next: ptr::null_mut(),
            sg_list: &raw mut piece,
            num_sge: i32::from(into.len > 0),
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair exists. The request and its piece exist during the call, which copies them. The
        // adapter checks the piece against the registration, which keeps the memory.
        let result = unsafe {
            match (*(*self.raw()).context).ops.post_recv {
                Some(post) => post(self.raw(), &raw mut request, &raw mut bad),
                None => libc::ENOSYS,
            }
        };
        self.posted(result, "receive", "ibv_post_recv", 0)?;
        receiving.outstanding += 1;
        Ok(())
    }

    pub(crate) fn post_send(&self, requests: &[SendRequest]) -> Result<(), RdmaError> {
        if !self.is_connected.load(Ordering::Acquire) {
            return Err(error(&self.subject, "ibv_post_send", io::Error::from_raw_os_error(libc::EINVAL)));
        }
        let mut sending = self.sending.lock();
        let fits = requests.len().min(sending.capacity - sending.outstanding.len());
        let (posted, result) =
            if fits == 0 { (0, 0) } else { self.post_some(&mut sending, &requests[..fits]) };
        sending.outstanding.extend(requests[..posted].iter().map(|request| request.id));
        self.posted(result, "send", "ibv_post_send", posted)?;
        if posted < requests.len() { Err(self.full("send", posted)) } else { Ok(()) }
    }

    /// Posts requests with one call; returns the number of posted requests and the adapter's result.
    fn post_some(&self, sending: &mut Sending, requests: &[SendRequest]) -> (usize, i32) {
        let first = sending.first + sending.outstanding.len() as u64;
        let (list, pieces) = (&mut sending.requests, &mut sending.pieces);
        pieces.clear();
        pieces.extend(requests.iter().map(|request| sge(request.from)));
        list.clear();
        list.extend(requests.iter().zip(first..).map(|(request, number)| work_request(request, number)));
        let (at, pieces) = (list.as_mut_ptr(), pieces.as_mut_ptr());
        for index in 0..requests.len() {
            // SAFETY: both lists have that many elements, and neither is moved before the call below has returned.
            unsafe {
                (*at.add(index)).sg_list = pieces.add(index);
                if index + 1 < requests.len() {
                    (*at.add(index)).next = at.add(index + 1);
                }
            }
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair exists. The list exists during the call, which copies it. The adapter checks each
        // piece against its registration, which keeps the memory.
        let result = unsafe {
            match (*(*self.raw()).context).ops.post_send {
                Some(post) => post(self.raw(), at, &raw mut bad),
                None => libc::ENOSYS,
            }
        };
        let posted = if result == 0 {
            requests.len()
        } else {
            bad.addr().saturating_sub(at.addr()) / size_of::<ibv_send_wr>()
        };
        (posted.min(requests.len()), result)
    }

    /// Appends available completions to `to`.
    pub(crate) fn poll(
        &self,
        queue: Queue,
        to: &mut Vec<Completion>,
        most: usize,
    ) -> Result<usize, RdmaError> {
        let mut take = |ready: &mut VecDeque<Completion>| {
            let count = most.min(ready.len());
            to.extend(ready.drain(..count));
            count
        };
        match queue {
            Queue::Send => {
                let mut sending = self.sending.lock();
                self.fill_send(&mut sending, most)?;
                Ok(take(&mut sending.ready))
            }
            Queue::Receive => {
                let mut receiving = self.receiving.lock();
                self.fill_receive(&mut receiving, most)?;
                Ok(take(&mut receiving.ready))
            }
        }
    }

    /// Whether a completion is available. It stays available for [`Queues::poll`].
    pub(crate) fn has_completion(&self, queue: Queue) -> Result<bool, RdmaError> {
        match queue {
            Queue::Send => {
                let mut sending = self.sending.lock();
                self.fill_send(&mut sending, 1)?;
                Ok(!sending.ready.is_empty())
            }
            Queue::Receive => {
                let mut receiving = self.receiving.lock();
                self.fill_receive(&mut receiving, 1)?;
                Ok(!receiving.ready.is_empty())
            }
        }
    }

    /// Whether the adapter still owes completions of receives. If the queue pair fails, it flushes each of them.
    pub(crate) fn owes_receives(&self, queue: Queue) -> bool {
        queue == Queue::Receive && self.receiving.lock().outstanding > 0
    }

    /// Requests a notification of the next completion. Earlier ones cause no notification, so poll again afterwards.
    pub(crate) fn arm(&self, queue: Queue) -> Result<(), RdmaError> {
        self.queue(queue).arm().map_err(|source| error(&self.subject, "ibv_req_notify_cq", source))
    }

    /// Consumes the available notifications.
    pub(crate) fn take_notifications(&self, queue: Queue) {
        self.queue(queue).take_notifications();
    }

    /// A descriptor that is readable when there is a notification.
    pub(crate) fn notifications(&self, queue: Queue) -> BorrowedFd<'_> {
        self.queue(queue).as_fd()
    }

    /// Grants or revokes the peer's right to write. Returns whether the queue pair still works.
    ///
    /// If the adapter does not revoke the right, the queue pair is put into the error state, in which it has no
    /// rights (specs/rdma.md §11.1).
    pub(crate) fn set_remote_write(&self, allowed: bool) -> Result<bool, RdmaError> {
        // SAFETY: zero is a valid value for every field of this structure of integers.
        let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_access_flags =
            if allowed { IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE } else { IBV_ACCESS_LOCAL_WRITE };
        match self.modify(attributes, IBV_QP_ACCESS_FLAGS) {
            Err(refused) if !allowed => {
                // SAFETY: as above.
                let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
                attributes.qp_state = IBV_QPS_ERR;
                // If both changes fail, the first error contains the reason.
                self.modify(attributes, IBV_QP_STATE).map(|()| false).map_err(|_| refused)
            }
            changed => changed.map(|()| true),
        }
    }

    fn modify(&self, mut attributes: ibv_qp_attr, named: i32) -> Result<(), RdmaError> {
        let modify = self.id.library().verbs.ibv_modify_qp;
        // SAFETY: the queue pair exists; the call reads only the named attributes.
        match unsafe { modify(self.raw(), &raw mut attributes, named) } {
            0 => Ok(()),
            errno => Err(error(&self.subject, "ibv_modify_qp", io::Error::from_raw_os_error(errno.abs()))),
        }
    }

    /// Starts to connect; an event reports the result.
    pub(crate) fn connect(&self, parameters: &mut rdma_conn_param) -> io::Result<()> {
        // SAFETY: the identifier and its queue pair exist; the private data exists during the call, which copies it.
        of_c(unsafe { (self.id.library().manager.rdma_connect)(self.id.raw(), parameters) })
    }

    /// Starts to accept; an event reports the result.
    pub(crate) fn accept(&self, parameters: &mut rdma_conn_param) -> io::Result<()> {
        // SAFETY: as above.
        of_c(unsafe { (self.id.library().manager.rdma_accept)(self.id.raw(), parameters) })
    }

    /// Puts the queue pair into the error state. It also informs the peer, or answers its disconnect.
    pub(crate) fn disconnect(&self) {
        // SAFETY: the identifier and its queue pair exist. The call fails if the connection has ended, which is
        // harmless.
        unsafe { (self.id.library().manager.rdma_disconnect)(self.id.raw()) };
    }

    /// The next event of `channel`, which must be this identifier's own channel.
    pub(crate) fn next_event(&self, channel: &Arc<EventChannel>) -> io::Result<Option<CmEvent>> {
        channel.next()
    }

    fn queue(&self, queue: Queue) -> &CompletionQueue {
        match queue {
            Queue::Send => &self.send,
            Queue::Receive => &self.receive,
        }
    }

    fn fill_send(&self, sending: &mut Sending, wanted: usize) -> Result<(), RdmaError> {
        while sending.ready.len() < wanted {
            let mut done = [ibv_wc::default(); BATCH];
            let count =
                self.send.poll(&mut done).map_err(|source| error(&self.subject, "ibv_poll_cq", source))?;
            for completion in &done[..count] {
                sending.complete(completion);
            }
            if count < BATCH {
                break;
            }
        }
        Ok(())
    }

    fn fill_receive(&self, receiving: &mut Receiving, wanted: usize) -> Result<(), RdmaError> {
        while receiving.ready.len() < wanted {
            let mut done = [ibv_wc::default(); BATCH];
            let count =
                self.receive.poll(&mut done).map_err(|source| error(&self.subject, "ibv_poll_cq", source))?;
            receiving.outstanding = receiving.outstanding.saturating_sub(count);
            receiving.ready.extend(done[..count].iter().map(|done| completion(done.wr_id, done, false)));
            if count < BATCH {
                break;
            }
        }
        Ok(())
    }

    fn posted(
        &self,
        errno: i32,
        queue: &'static str,
        call: &'static str,
        posted: usize,
    ) -> Result<(), RdmaError> {
        match errno.abs() {
            0 => Ok(()),
            libc::ENOMEM => Err(self.full(queue, posted)),
            // All other arguments are valid: each request has one piece of registered memory. So the state is the
            // reason.
            libc::EINVAL if self.is_connected.load(Ordering::Acquire) => {
                let event = Some(Event::Fatal(IN_ERROR.to_owned()));
                Err(RdmaError::Ended { peer: self.subject.clone(), event })
            }
            errno => Err(error(&self.subject, call, io::Error::from_raw_os_error(errno))),
        }
    }

    fn full(&self, queue: &'static str, posted: usize) -> RdmaError {
        RdmaError::QueueFull { peer: self.subject.clone(), queue, posted }
    }
}

impl Sending {
    /// Finishes all requests up to the completed one.
    fn complete(&mut self, done: &ibv_wc) {
        let Some(index) = done.wr_id.checked_sub(self.first).map(|index| index as usize) else { return };
        let Some(id) = self.outstanding.get(index).copied() else { return };
        self.outstanding.drain(..=index);
        self.first = done.wr_id + 1;
        self.ready.push_back(completion(id, done, true));
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        // SAFETY: destroyed once, before its completion queues, its domain and its identifier.
        unsafe { (self.id.library().manager.rdma_destroy_qp)(self.id.raw()) };
    }
}

impl fmt::Debug for Queues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queues").field("id", &self.id).field("domain", &self.domain).finish_non_exhaustive()
    }
}

fn sge(piece: Piece) -> ibv_sge {
    ibv_sge { addr: piece.address, length: piece.len, lkey: piece.lkey }
}

/// The C request without its piece and its successor.
fn work_request(request: &SendRequest, number: u64) -> ibv_send_wr {
    // SAFETY: zero is a valid value for every field of this structure of integers and pointers.
    let mut raw: ibv_send_wr = unsafe { std::mem::zeroed() };
    raw.wr_id = number;
    raw.num_sge = i32::from(request.from.len > 0);
    raw.send_flags = if request.is_signalled { IBV_SEND_SIGNALED } else { 0 };
    (raw.opcode, raw.wr.remote_addr, raw.wr.rkey) = match request.operation {
        Operation::Send => (IBV_WR_SEND, 0, 0),
        Operation::Write { address, rkey } => (IBV_WR_RDMA_WRITE, address, rkey),
        Operation::WriteWithImmediate { address, rkey, .. } => (IBV_WR_RDMA_WRITE_WITH_IMM, address, rkey),
    };
    if let Operation::WriteWithImmediate { immediate, .. } = request.operation {
        raw.imm_data = immediate.to_be();
    }
    raw
}

fn completion(id: u64, done: &ibv_wc, is_send: bool) -> Completion {
    let kind = match done.opcode {
        IBV_WC_RDMA_WRITE if is_send => CompletionKind::Write,
        _ if is_send => CompletionKind::Send,
        IBV_WC_RECV_RDMA_WITH_IMM => CompletionKind::ReceiveImmediate(u32::from_be(done.imm_data)),
        _ => CompletionKind::Receive,
    };
    Completion { id, status: CompletionStatus::from_verbs(done.status), kind, bytes: done.byte_len }
}

/// A completion queue with its notification channel.
struct CompletionQueue {
    domain: Arc<Domain>,
    raw: NonNull<ibv_cq>,
    channel: NonNull<ibv_comp_channel>,
}

impl CompletionQueue {
    fn new(domain: &Arc<Domain>, entries: u32) -> Result<Self, RdmaError> {
        let (context, entries) = (domain.context(), i32::try_from(entries.max(1)).unwrap_or(i32::MAX));
        let verbs = &context.library().verbs;
        // SAFETY: the device is open.
        let channel = NonNull::new(unsafe { (verbs.ibv_create_comp_channel)(context.raw()) })
            .ok_or_else(|| failed(context.name(), "ibv_create_comp_channel"))?;
        // SAFETY: the device is open, and the channel belongs to it.
        let raw = NonNull::new(unsafe {
            (verbs.ibv_create_cq)(context.raw(), entries, ptr::null_mut(), channel.as_ptr(), 0)
        });
        let Some(raw) = raw else {
            let failure = failed(context.name(), "ibv_create_cq");
            // SAFETY: no completion queue uses the channel.
            unsafe { (verbs.ibv_destroy_comp_channel)(channel.as_ptr()) };
            return Err(failure);
        };
        let queue = Self { domain: domain.clone(), raw, channel };
        fcntl_setfl(queue.as_fd(), OFlags::NONBLOCK)
            .map_err(|errno| error(context.name(), "fcntl", errno.into()))?;
        Ok(queue)
    }

    fn poll(&self, done: &mut [ibv_wc]) -> io::Result<usize> {
        let most = i32::try_from(done.len()).unwrap_or(i32::MAX);
        // SAFETY: the queue exists, and the slice has room for `most` entries.
        let count = unsafe {
            match (*(*self.raw.as_ptr()).context).ops.poll_cq {
                Some(poll) => poll(self.raw.as_ptr(), most, done.as_mut_ptr()),
                None => -libc::ENOSYS,
            }
        };
        usize::try_from(count).map_err(|_| io::Error::from_raw_os_error(-count))
    }

    fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue exists.
        let errno = unsafe {
            match (*(*self.raw.as_ptr()).context).ops.req_notify_cq {
                Some(arm) => arm(self.raw.as_ptr(), 0),
                None => libc::ENOSYS,
            }
        };
        if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno.abs())) }
    }

    fn take_notifications(&self) {
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        let verbs = &self.domain.context().library().verbs;
        let channel = self.channel.as_ptr();
        // SAFETY: the channel is open and does not block; both pointers are written before the call returns 0. Each
        // notification is acknowledged, because destroying the queue waits for that.
        unsafe {
            while (verbs.ibv_get_cq_event)(channel, &raw mut queue, &raw mut context) == 0 {
                (verbs.ibv_ack_cq_events)(queue, 1);
            }
        }
    }
}

impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open while the channel exists, which is as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let verbs = &self.domain.context().library().verbs;
        // SAFETY: the queue pair is destroyed (`Queues` is dropped before its fields), the notifications are
        // acknowledged, and both objects are destroyed once.
        unsafe {
            (verbs.ibv_destroy_cq)(self.raw.as_ptr());
            (verbs.ibv_destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}

#[cfg(test)]
mod tests;
