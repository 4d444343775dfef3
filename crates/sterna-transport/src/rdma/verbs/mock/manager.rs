//! The mock of librdmacm: event channels, identifiers and connecting.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::*;
use crate::rdma::transitions;
use crate::rdma::verbs::sockaddr;

/// An internal event of the library, which `rdma_get_cm_event` converts before its caller sees it.
const CONNECT_RESPONSE: c_uint = 5;
const INIT: c_uint = 1;
const READY_TO_RECEIVE: c_uint = 2;
/// Time for which a delayed thread waits for the destruction of the queue pair.
const HOLD_UP: Duration = Duration::from_millis(200);

/// An event that was not read yet.
pub(super) struct Pending {
    id: usize,
    kind: c_uint,
    status: c_int,
    private_data: Vec<u8>,
    /// For a connect request: its new identifier. Otherwise 0.
    request: usize,
}

/// An identifier. `raw` is the address of the structure that the binding reads.
pub(super) struct Identifier {
    raw: usize,
    channel: usize,
    is_listening: bool,
    port: u16,
    /// The identifier at the other end.
    peer: Option<usize>,
    rnr_retry: u8,
}

pub(super) fn functions() -> Manager {
    Manager {
        rdma_create_event_channel,
        rdma_destroy_event_channel,
        rdma_get_cm_event,
        rdma_ack_cm_event,
        rdma_create_id,
        rdma_destroy_id,
        rdma_migrate_id,
        rdma_set_option,
        rdma_bind_addr,
        rdma_listen,
        rdma_resolve_addr,
        rdma_resolve_route,
        rdma_create_qp,
        rdma_destroy_qp,
        rdma_connect,
        rdma_accept,
        rdma_reject,
        rdma_disconnect,
        rdma_get_src_port,
    }
}

impl Identifier {
    /// Address of the C structure.
    pub(super) fn address(&self) -> usize {
        self.raw
    }

    /// Whether the identifier connects, or has connected, to a listener at this port.
    pub(super) fn is_of(&self, port: u16) -> bool {
        !self.is_listening && self.port == port
    }
}

fn raw_of(id: usize) -> *mut rdma_cm_id {
    std::ptr::with_exposed_provenance_mut(id)
}

/// The identifier's queue pair, read without a lock, as librdmacm does.
fn pair_of(id: usize) -> Option<usize> {
    // SAFETY: the caller of the library keeps the identifier alive.
    let pair = unsafe { (*raw_of(id)).qp.addr() };
    let is_held_up = world().held_up.remove(&id);
    let until = Instant::now() + HOLD_UP;
    while is_held_up && Instant::now() < until && !world().pairs.get(&pair).is_some_and(|pair| pair.is_freed)
    {
        std::thread::sleep(Duration::from_millis(1));
    }
    (pair != 0).then_some(pair)
}

impl World {
    fn push(&mut self, id: usize, kind: c_uint, status: c_int, private_data: Vec<u8>, request: usize) {
        let Some(channel) = self.ids.get(&id).map(|id| id.channel) else { return };
        self.channels.entry(channel).or_default().push_back(Pending {
            id,
            kind,
            status,
            private_data,
            request,
        });
        // SAFETY: an identifier's channel is open.
        notify(unsafe { (*std::ptr::with_exposed_provenance::<rdma_event_channel>(channel)).fd });
    }

    /// Makes a queue pair ready, with the same steps as librdmacm.
    fn make_ready(&mut self, id: usize, pair: usize) -> c_int {
        let named = attribute_bits();
        let steps = [
            (INIT, named, IBV_ACCESS_REMOTE_WRITE),
            (READY_TO_RECEIVE, transitions::TO_RECEIVE, 0),
            (IBV_QPS_RTS, transitions::TO_SEND, 0),
        ];
        for (state, named, access) in steps {
            let result = self.modify(pair, Some(state), named, access);
            if result != 0 {
                return fail(result);
            }
        }
        let peer = self.ids.get(&id).and_then(|id| id.peer);
        let rnr_retry = self.ids.get(&id).map_or(0, |id| id.rnr_retry);
        let theirs = peer.map(|peer| {
            // SAFETY: the link to a peer is removed before its identifier is destroyed.
            unsafe { (*raw_of(peer)).qp.addr() }
        });
        if let Some(own) = self.pairs.get_mut(&pair) {
            (own.peer, own.rnr_retry) = (theirs, rnr_retry);
        }
        0
    }
}

fn attribute_bits() -> u32 {
    use crate::rdma::transitions::attribute::{ACCESS_FLAGS, PKEY_INDEX, PORT, STATE};
    STATE | PKEY_INDEX | PORT | ACCESS_FLAGS
}

unsafe extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    let channel = object(rdma_event_channel { fd: descriptor() });
    world().channels.insert(channel.expose_provenance(), VecDeque::new());
    channel
}

unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    world().channels.remove(&channel.addr());
    // SAFETY: created above, and destroyed once, with its descriptor open.
    unsafe { libc::close(Box::from_raw(channel).fd) };
}

unsafe extern "C" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    to: *mut *mut rdma_cm_event,
) -> c_int {
    loop {
        // SAFETY: the caller passes an open channel.
        if !take(unsafe { (*channel).fd }) {
            return fail(libc::EAGAIN);
        }
        let pending = world().channels.get_mut(&channel.addr()).and_then(VecDeque::pop_front);
        // Destroying an identifier removes its events, so a notification may have none.
        let Some(mut pending) = pending else { continue };
        match pending.kind {
            CONNECT_RESPONSE => {
                let pair = pair_of(pending.id);
                let mut world = world();
                let made = pair.map_or_else(|| fail(libc::EINVAL), |pair| world.make_ready(pending.id, pair));
                pending.kind =
                    if made == 0 { RDMA_CM_EVENT_ESTABLISHED } else { RDMA_CM_EVENT_CONNECT_ERROR };
                let (peer, port) = world.ids.get(&pending.id).map_or((None, 0), |id| (id.peer, id.port));
                if let Some(peer) = peer.filter(|_| made == 0 && !world.unconfirmed.contains(&port)) {
                    world.push(peer, RDMA_CM_EVENT_ESTABLISHED, 0, Vec::new(), 0);
                }
            }
            RDMA_CM_EVENT_REJECTED | RDMA_CM_EVENT_CONNECT_ERROR | RDMA_CM_EVENT_UNREACHABLE => {
                if let Some(pair) = pair_of(pending.id) {
                    world().modify(pair, Some(IBV_QPS_ERR), IBV_QP_STATE as u32, 0);
                }
            }
            _ => {}
        }
        let data = pending.private_data.into_boxed_slice();
        let mut conn: rdma_conn_param = zeroed();
        conn.private_data_len = data.len() as u8;
        conn.private_data = Box::into_raw(data).cast::<c_void>().cast_const();
        let mut event: rdma_cm_event = zeroed();
        event.id = raw_of(if pending.request == 0 { pending.id } else { pending.request });
        (event.event, event.status, event.param.conn) = (pending.kind, pending.status, conn);
        // SAFETY: the caller passes a valid place for the pointer.
        unsafe { *to = object(event) };
        return 0;
    }
}

unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    // SAFETY: both were allocated above, and are freed once.
    unsafe {
        let event = Box::from_raw(event);
        let conn = event.param.conn;
        let bytes = conn.private_data.cast_mut().cast::<u8>();
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(bytes, conn.private_data_len.into())));
    }
    0
}

fn new_id(channel: *mut rdma_event_channel) -> usize {
    let mut raw: rdma_cm_id = zeroed();
    raw.channel = channel;
    let id = object(raw).expose_provenance();
    let (channel, mut world) = (channel.addr(), world());
    let state = Identifier { raw: id, channel, is_listening: false, port: 0, peer: None, rnr_retry: 0 };
    world.ids.insert(id, state);
    id
}

unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    to: *mut *mut rdma_cm_id,
    _: *mut c_void,
    _: c_uint,
) -> c_int {
    // SAFETY: the caller passes a valid place for the pointer.
    unsafe { *to = raw_of(new_id(channel)) };
    0
}

unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    let (at, mut world) = (id.addr(), world());
    // SAFETY: the caller keeps the identifier alive until now.
    if !unsafe { (*id).qp.is_null() } {
        world.violation(at, "an identifier was destroyed before its queue pair");
    }
    if let Some(own) = world.ids.remove(&at) {
        if let Some(events) = world.channels.get_mut(&own.channel) {
            events.retain(|pending| pending.id != at);
        }
        if let Some(peer) = own.peer {
            world.push(peer, RDMA_CM_EVENT_DISCONNECTED, 0, Vec::new(), 0);
            if let Some(peer) = world.ids.get_mut(&peer) {
                peer.peer = None;
            }
        }
    }
    // The memory is kept, so that a later use finds a null queue pair instead of freed memory.
    0
}

unsafe extern "C" fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    let mut world = world();
    let Some(own) = world.ids.get_mut(&id.addr()) else { return fail(libc::EINVAL) };
    let before = std::mem::replace(&mut own.channel, channel.addr());
    // SAFETY: the caller keeps the identifier and both channels alive.
    unsafe { (*id).channel = channel };
    let events = world.channels.get_mut(&before).map(std::mem::take).unwrap_or_default();
    let (moved, kept): (VecDeque<_>, VecDeque<_>) =
        events.into_iter().partition(|event| event.id == id.addr());
    world.channels.insert(before, kept);
    for event in moved {
        world.push(event.id, event.kind, event.status, event.private_data, event.request);
    }
    0
}

unsafe extern "C" fn rdma_set_option(
    _: *mut rdma_cm_id,
    _: c_int,
    _: c_int,
    _: *mut c_void,
    _: usize,
) -> c_int {
    0
}

/// Binds an identifier to the device and the two addresses.
fn bind(id: *mut rdma_cm_id, own: SocketAddr, peer: Option<SocketAddr>) {
    let context = context();
    // SAFETY: the caller keeps the identifier alive, and no other thread has it yet.
    unsafe {
        ((*id).verbs, (*id).port_num) = (context, 1);
        (*id).route.addr.src_storage = sockaddr::to_c(own);
        if let Some(peer) = peer {
            (*id).route.addr.dst_storage = sockaddr::to_c(peer);
        }
    }
}

/// The socket address that a caller passes.
fn address(at: *mut libc::sockaddr) -> Option<SocketAddr> {
    // SAFETY: the binding passes storage that is large enough for every family.
    sockaddr::from_c(unsafe { &*at.cast::<libc::sockaddr_storage>() })
}

unsafe extern "C" fn rdma_bind_addr(id: *mut rdma_cm_id, at: *mut libc::sockaddr) -> c_int {
    let Some(mut own) = address(at) else { return fail(libc::EINVAL) };
    let mut world = world();
    if own.port() == 0 {
        own.set_port(20_000 + world.number() as u16);
    }
    if let Some(id) = world.ids.get_mut(&id.addr()) {
        id.port = own.port();
    }
    drop(world);
    bind(id, own, None);
    0
}

unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, _: c_int) -> c_int {
    if let Some(id) = world().ids.get_mut(&id.addr()) {
        id.is_listening = true;
    }
    0
}

unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    _: *mut libc::sockaddr,
    to: *mut libc::sockaddr,
    _: c_int,
) -> c_int {
    let Some(peer) = address(to) else { return fail(libc::EINVAL) };
    bind(id, SocketAddr::new(peer.ip(), 0), Some(peer));
    let mut world = world();
    if let Some(id) = world.ids.get_mut(&id.addr()) {
        id.port = peer.port();
    }
    world.push(id.addr(), RDMA_CM_EVENT_ADDR_RESOLVED, 0, Vec::new(), 0);
    0
}

unsafe extern "C" fn rdma_resolve_route(id: *mut rdma_cm_id, _: c_int) -> c_int {
    world().push(id.addr(), RDMA_CM_EVENT_ROUTE_RESOLVED, 0, Vec::new(), 0);
    0
}

unsafe extern "C" fn rdma_create_qp(
    id: *mut rdma_cm_id,
    domain: *mut ibv_pd,
    wanted: *mut ibv_qp_init_attr,
) -> c_int {
    let (mut raw, context): (ibv_qp, _) = (zeroed(), context());
    (raw.context, raw.pd) = (context, domain);
    let raw = object(raw);
    // SAFETY: the caller passes valid attributes, and keeps the identifier alive.
    let wanted = unsafe {
        (*id).qp = raw;
        &*wanted
    };
    let pair = QueuePair {
        id: id.addr(),
        domain: domain.addr(),
        state: QueuePairState::Init,
        access: 0,
        send: wanted.send_cq.addr(),
        receive: wanted.recv_cq.addr(),
        capacities: [wanted.cap.max_send_wr as usize, wanted.cap.max_recv_wr as usize],
        peer: None,
        rnr_retry: 0,
        requests: VecDeque::new(),
        receives: VecDeque::new(),
        is_freed: false,
    };
    world().pairs.insert(raw.expose_provenance(), pair);
    0
}

unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    // SAFETY: the caller keeps the identifier and its queue pair alive.
    let pair = unsafe { (*id).qp.addr() };
    if let Some(pair) = world().pairs.get_mut(&pair) {
        pair.is_freed = true;
        pair.requests.clear();
        pair.receives.clear();
    }
    // SAFETY: as above. Until the pointer is cleared, it refers to the freed queue pair, as in librdmacm.
    unsafe { (*id).qp = std::ptr::null_mut() };
}

fn private_data(parameters: *mut rdma_conn_param, len: usize) -> (Vec<u8>, u8) {
    // SAFETY: the caller passes valid parameters, whose pointer leads to as many bytes as their length says.
    let (bytes, rnr_retry) = unsafe {
        let parameters = &*parameters;
        let (at, len) = (parameters.private_data.cast::<u8>(), usize::from(parameters.private_data_len));
        let bytes = if len == 0 { &[][..] } else { std::slice::from_raw_parts(at, len) };
        (bytes.to_vec(), parameters.rnr_retry_count)
    };
    let mut bytes = bytes;
    bytes.resize(len, 0);
    (bytes, rnr_retry)
}

unsafe extern "C" fn rdma_connect(id: *mut rdma_cm_id, parameters: *mut rdma_conn_param) -> c_int {
    let (asked, rnr_retry) = private_data(parameters, 56);
    let (listener, channel) = {
        let world = world();
        let port = world.ids.get(&id.addr()).map_or(0, |id| id.port);
        let found = world.ids.iter().find(|(_, of)| of.is_listening && of.port == port);
        match found {
            Some((at, listener)) => (*at, listener.channel),
            None => {
                drop(world);
                super::world().push(id.addr(), RDMA_CM_EVENT_REJECTED, 8, vec![0; 148], 0);
                return 0;
            }
        }
    };
    let request = new_id(std::ptr::with_exposed_provenance_mut(channel));
    // SAFETY: the caller keeps its identifier alive.
    let own = unsafe { sockaddr::from_c(&(*id).route.addr.src_storage) };
    let at = own.unwrap_or_else(|| SocketAddr::from(([0, 0, 0, 0], 0)));
    bind(raw_of(request), at, Some(at));
    let mut world = world();
    if let Some(of) = world.ids.get_mut(&id.addr()) {
        of.peer = Some(request);
    }
    if let Some(of) = world.ids.get_mut(&request) {
        // Each side's RNR retry count applies to the sends of the other side.
        (of.peer, of.rnr_retry) = (Some(id.addr()), rnr_retry);
    }
    world.push(listener, RDMA_CM_EVENT_CONNECT_REQUEST, 0, asked, request);
    0
}

unsafe extern "C" fn rdma_accept(id: *mut rdma_cm_id, parameters: *mut rdma_conn_param) -> c_int {
    let (reply, rnr_retry) = private_data(parameters, 196);
    let Some(pair) = pair_of(id.addr()) else { return fail(libc::EINVAL) };
    let mut world = world();
    let Some(peer) = world.ids.get(&id.addr()).and_then(|id| id.peer) else { return fail(libc::EINVAL) };
    if world.make_ready(id.addr(), pair) != 0 {
        return -1;
    }
    if let Some(peer) = world.ids.get_mut(&peer) {
        peer.rnr_retry = rnr_retry;
    }
    world.push(peer, CONNECT_RESPONSE, 0, reply, 0);
    0
}

unsafe extern "C" fn rdma_reject(id: *mut rdma_cm_id, bytes: *const c_void, len: u8) -> c_int {
    let mut said = if len == 0 {
        Vec::new()
    } else {
        // SAFETY: the caller passes `len` readable bytes.
        unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), len.into()) }.to_vec()
    };
    said.resize(148, 0);
    let mut world = world();
    let Some(peer) = world.ids.get_mut(&id.addr()).and_then(|id| id.peer.take()) else {
        return fail(libc::EINVAL);
    };
    world.push(peer, RDMA_CM_EVENT_REJECTED, 28, said, 0);
    0
}

unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    let Some(pair) = pair_of(id.addr()) else { return fail(libc::EINVAL) };
    let mut world = world();
    let result = world.modify(pair, Some(IBV_QPS_ERR), IBV_QP_STATE as u32, 0);
    let Some(peer) = world.ids.get_mut(&id.addr()).and_then(|id| id.peer.take()) else {
        return fail(libc::EINVAL);
    };
    world.push(peer, RDMA_CM_EVENT_DISCONNECTED, 0, Vec::new(), 0);
    if let Some(peer) = world.ids.get_mut(&peer) {
        peer.peer = None;
    }
    if result == 0 { 0 } else { fail(result) }
}

unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: the caller keeps the identifier alive.
    let own = unsafe { sockaddr::from_c(&(*id).route.addr.src_storage) };
    own.map_or(0, |own| own.port().to_be())
}
