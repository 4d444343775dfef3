//! Queue pairs and completion queues of the mock. A request is executed when it is posted, or when its missing
//! receive is.

use super::*;
use crate::rdma::transitions::{self, QueuePairState};

/// Payload of one packet in bytes.
const PACKET: u64 = 4096;

/// A posted send or write that is not executed yet.
pub(super) struct Request {
    id: u64,
    opcode: c_uint,
    is_signalled: bool,
    from: ibv_sge,
    immediate: u32,
    to: (u64, u32),
}

/// A posted receive that is not completed yet.
pub(super) struct Receive {
    id: u64,
    into: ibv_sge,
}

pub(super) unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    object(ibv_comp_channel { context, fd: descriptor(), refcnt: 0 })
}

pub(super) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: created above, and destroyed once, with its descriptor open.
    unsafe { libc::close(Box::from_raw(channel).fd) }
}

pub(super) unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    _: c_int,
    _: *mut c_void,
    channel: *mut ibv_comp_channel,
    _: c_int,
) -> *mut ibv_cq {
    let mut queue: ibv_cq = zeroed();
    (queue.context, queue.channel) = (context, channel);
    let queue = object(queue);
    // SAFETY: the caller passes an open channel.
    let channel = unsafe { (*channel).fd };
    let state = CompletionQueue { channel, entries: VecDeque::new(), is_armed: false };
    world().queues.insert(queue.addr(), state);
    queue
}

pub(super) unsafe extern "C" fn ibv_destroy_cq(queue: *mut ibv_cq) -> c_int {
    let mut world = world();
    if world.pairs.values().any(|pair| !pair.is_freed && [pair.send, pair.receive].contains(&queue.addr())) {
        world.violation(0, "a completion queue was destroyed before its queue pair");
        return libc::EBUSY;
    }
    world.queues.remove(&queue.addr());
    0
}

pub(super) unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    queue: *mut *mut ibv_cq,
    _: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller passes an open channel, and a place for the queue's pointer, which the binding does not use.
    unsafe {
        *queue = std::ptr::null_mut();
        if take((*channel).fd) { 0 } else { -1 }
    }
}

pub(super) unsafe extern "C" fn ibv_ack_cq_events(_: *mut ibv_cq, _: c_uint) {}

pub(super) unsafe extern "C" fn poll_cq(queue: *mut ibv_cq, most: c_int, to: *mut ibv_wc) -> c_int {
    let mut world = world();
    let Some(queue) = world.queues.get_mut(&queue.addr()) else { return -libc::EINVAL };
    let count = queue.entries.len().min(usize::try_from(most).unwrap_or(0));
    for (at, entry) in queue.entries.drain(..count).enumerate() {
        // SAFETY: the caller's array has room for `most` entries.
        unsafe { to.add(at).write(entry) };
    }
    count as c_int
}

pub(super) unsafe extern "C" fn req_notify_cq(queue: *mut ibv_cq, _: c_int) -> c_int {
    match world().queues.get_mut(&queue.addr()) {
        Some(queue) => {
            queue.is_armed = true;
            0
        }
        None => libc::EINVAL,
    }
}

pub(super) unsafe extern "C" fn ibv_modify_qp(
    pair: *mut ibv_qp,
    attributes: *mut ibv_qp_attr,
    named: c_int,
) -> c_int {
    // SAFETY: the caller passes the attributes; those that it does not name are not used.
    let attributes = unsafe { &*attributes };
    let next = (named & IBV_QP_STATE != 0).then_some(attributes.qp_state);
    world().modify(pair.addr(), next, named as u32, attributes.qp_access_flags)
}

pub(super) unsafe extern "C" fn post_recv(
    pair: *mut ibv_qp,
    request: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller passes a request, a place for the failed one, and as many pieces as the request says.
    let (id, into) = unsafe {
        *bad = request;
        let into = if (*request).num_sge > 0 { *(*request).sg_list } else { ibv_sge::default() };
        ((*request).wr_id, into)
    };
    let mut world = world();
    let Some(own) = world.live_pair(pair.addr(), "ibv_post_recv") else { return libc::EINVAL };
    if matches!(own.state, QueuePairState::Reset | QueuePairState::Error) {
        return libc::EINVAL;
    }
    if own.receives.len() >= own.capacities[1] {
        return libc::ENOMEM;
    }
    own.receives.push_back(Receive { id, into });
    if let Some(peer) = own.peer {
        world.execute(peer);
    }
    0
}

pub(super) unsafe extern "C" fn post_send(
    pair: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let (mut world, mut at) = (world(), first);
    // SAFETY: the caller passes a list that ends with a null pointer, with as many pieces as each request says.
    while let Some(request) = unsafe { at.as_ref() } {
        // SAFETY: as above.
        unsafe { *bad = at };
        let Some(own) = world.live_pair(pair.addr(), "ibv_post_send") else { return libc::EINVAL };
        if own.state != QueuePairState::ReadyToSend {
            return libc::EINVAL;
        }
        if own.requests.len() >= own.capacities[0] {
            return libc::ENOMEM;
        }
        // SAFETY: as above.
        let from = if request.num_sge > 0 { unsafe { *request.sg_list } } else { ibv_sge::default() };
        own.requests.push_back(Request {
            id: request.wr_id,
            opcode: request.opcode,
            is_signalled: request.send_flags & IBV_SEND_SIGNALED != 0,
            from,
            immediate: request.imm_data,
            to: (request.wr.remote_addr, request.wr.rkey),
        });
        at = request.next;
    }
    world.execute(pair.addr());
    0
}

impl World {
    /// The queue pair, or `None` if it was destroyed, which is recorded as a violation.
    fn live_pair(&mut self, pair: usize, call: &str) -> Option<&mut QueuePair> {
        match self.pairs.get(&pair).map(|pair| (pair.is_freed, pair.id)) {
            Some((false, _)) => self.pairs.get_mut(&pair),
            Some((true, id)) => {
                self.violation(id, &format!("{call} of a queue pair that was destroyed"));
                None
            }
            None => None,
        }
    }

    pub(super) fn modify(&mut self, pair: usize, next: Option<c_uint>, named: u32, access: u32) -> c_int {
        let Some(own) = self.live_pair(pair, "ibv_modify_qp") else { return libc::EINVAL };
        let next = match next {
            None => own.state,
            Some(2) => QueuePairState::ReadyToReceive,
            Some(IBV_QPS_RTS) => QueuePairState::ReadyToSend,
            Some(IBV_QPS_ERR) => QueuePairState::Error,
            Some(_) => QueuePairState::Init,
        };
        if !transitions::is_allowed(own.state, next, named) {
            return libc::EINVAL;
        }
        own.state = next;
        if named & IBV_QP_ACCESS_FLAGS as u32 != 0 {
            own.access = access;
        }
        if next == QueuePairState::Error {
            self.flush(pair);
        }
        0
    }

    fn flush(&mut self, pair: usize) {
        let Some(own) = self.pairs.get_mut(&pair) else { return };
        let (send, receive) = (own.send, own.receive);
        let requests = std::mem::take(&mut own.requests);
        let receives = std::mem::take(&mut own.receives);
        for request in requests {
            self.complete(send, request.id, IBV_WC_WR_FLUSH_ERR, IBV_WC_SEND, 0, 0);
        }
        for request in receives {
            self.complete(receive, request.id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0, 0);
        }
    }

    fn complete(
        &mut self,
        queue: usize,
        id: u64,
        status: c_uint,
        opcode: c_uint,
        bytes: u32,
        immediate: u32,
    ) {
        let Some(queue) = self.queues.get_mut(&queue) else { return };
        let entry =
            ibv_wc { wr_id: id, status, opcode, byte_len: bytes, imm_data: immediate, ..ibv_wc::default() };
        queue.entries.push_back(entry);
        if std::mem::take(&mut queue.is_armed) {
            notify(queue.channel);
        }
    }

    /// Executes requests of a pair until one must wait.
    fn execute(&mut self, pair: usize) {
        while let Some(status) = self.step(pair) {
            let Some(own) = self.pairs.get_mut(&pair) else { return };
            let (send, Some(request)) = (own.send, own.requests.pop_front()) else { return };
            let opcode = if request.opcode == IBV_WR_SEND { IBV_WC_SEND } else { IBV_WC_RDMA_WRITE };
            if request.is_signalled || status != IBV_WC_SUCCESS {
                self.complete(send, request.id, status, opcode, 0, 0);
            }
            if status != IBV_WC_SUCCESS {
                self.modify(pair, Some(IBV_QPS_ERR), IBV_QP_STATE as u32, 0);
                return;
            }
        }
    }

    /// Executes a pair's first request and returns its status. `None` if there is none, or it must wait.
    fn step(&mut self, pair: usize) -> Option<c_uint> {
        let own = self.pairs.get(&pair)?;
        let request = own.requests.front()?;
        let (from, opcode, immediate, to) = (request.from, request.opcode, request.immediate, request.to);
        let (domain, rnr_retry, peer_at) = (own.domain, own.rnr_retry, own.peer?);
        if from.length > 0 && !self.has(domain, from.lkey, false, from.addr, from.length.into(), 0) {
            return Some(IBV_WC_LOC_PROT_ERR);
        }
        let peer = self.pairs.get(&peer_at).filter(|peer| !peer.is_freed)?;
        if !matches!(peer.state, QueuePairState::ReadyToReceive | QueuePairState::ReadyToSend) {
            return None;
        }
        let (their_domain, receive) =
            (peer.domain, peer.receives.front().map(|receive| (receive.id, receive.into)));
        let no_receive = if rnr_retry == 0 { Some(IBV_WC_RNR_RETRY_EXC_ERR) } else { None };
        if opcode == IBV_WR_SEND {
            let Some((id, into)) = receive else { return no_receive };
            let status = if from.length > into.length {
                IBV_WC_LOC_LEN_ERR
            } else if !self.has(
                their_domain,
                into.lkey,
                false,
                into.addr,
                from.length.into(),
                IBV_ACCESS_LOCAL_WRITE,
            ) {
                IBV_WC_LOC_PROT_ERR
            } else {
                self.copy(from.addr, into.addr, from.length.into());
                IBV_WC_SUCCESS
            };
            self.receive(peer_at, id, status, IBV_WC_RECV, from.length, 0);
            return Some(if status == IBV_WC_SUCCESS { status } else { IBV_WC_REM_OP_ERR });
        }
        if peer.access & IBV_ACCESS_REMOTE_WRITE == 0 {
            return Some(IBV_WC_REM_INV_REQ_ERR);
        }
        let len = u64::from(from.length);
        if len > 0 && !self.has(their_domain, to.1, true, to.0, len, IBV_ACCESS_REMOTE_WRITE) {
            return Some(IBV_WC_REM_ACCESS_ERR);
        }
        let needs_receive = opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
        let is_short = needs_receive && receive.is_none();
        self.copy(from.addr, to.0, if is_short { len.saturating_sub(1) / PACKET * PACKET } else { len });
        match receive {
            Some((id, _)) if needs_receive => {
                self.receive(peer_at, id, IBV_WC_SUCCESS, IBV_WC_RECV_RDMA_WITH_IMM, from.length, immediate);
            }
            None if needs_receive => return no_receive,
            _ => {}
        }
        Some(IBV_WC_SUCCESS)
    }

    /// Completes a pair's first receive.
    fn receive(&mut self, pair: usize, id: u64, status: c_uint, opcode: c_uint, bytes: u32, immediate: u32) {
        let Some(own) = self.pairs.get_mut(&pair) else { return };
        own.receives.pop_front();
        let queue = own.receive;
        self.complete(queue, id, status, opcode, bytes, immediate);
        if status != IBV_WC_SUCCESS {
            self.modify(pair, Some(IBV_QPS_ERR), IBV_QP_STATE as u32, 0);
        }
    }

    /// Whether a key of a domain covers the whole range and includes a right.
    fn has(&self, domain: usize, key: u32, is_remote: bool, at: u64, len: u64, right: u32) -> bool {
        let Some(region) = self.regions.get(&(key >> 8)) else { return len == 0 };
        let is_inside = at
            .checked_sub(region.address)
            .is_some_and(|from| from.checked_add(len).is_some_and(|end| end <= region.len));
        let is_key = key & 0xff == if is_remote { 0x80 } else { 0x10 };
        is_key && region.domain == domain && is_inside && (right == 0 || region.access & right != 0)
    }

    fn copy(&self, from: u64, to: u64, len: u64) {
        let from = std::ptr::with_exposed_provenance::<u8>(from as usize);
        let to = std::ptr::with_exposed_provenance_mut::<u8>(to as usize);
        // SAFETY: both ranges were checked against registrations, whose owners keep the memory mapped. Tests do
        // not write memory while a request uses it.
        unsafe { std::ptr::copy(from, to, len as usize) };
    }
}
