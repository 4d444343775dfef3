//! Mocks of libibverbs and librdmacm, for tests of the binding on machines without adapters.
//!
//! They offer one device, and a connection manager that connects this process with itself. They are as strict as
//! the kernel's table of states and the strictest drivers (specs/rdma.md §11), and record every use of a destroyed
//! object.
//!
//! As in librdmacm, an identifier's queue pair is used without a lock. A test can delay a thread between reading
//! the pointer and using it ([`World::held_up`]).

mod manager;
mod queues;
mod tests;

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::LazyLock;

use parking_lot::{Mutex, MutexGuard};

use super::abi::*;
use super::library::{Library, Manager, Verbs};
use crate::rdma::transitions::QueuePairState;

/// The mock libraries as the binding sees them.
static LIBRARY: LazyLock<Library> =
    LazyLock::new(|| Library { verbs: verbs(), manager: manager::functions() });

static WORLD: LazyLock<Mutex<World>> = LazyLock::new(Mutex::default);

/// All objects, by the addresses under which the binding uses them.
#[derive(Default)]
struct World {
    channels: HashMap<usize, VecDeque<manager::Pending>>,
    ids: HashMap<usize, manager::Identifier>,
    pairs: HashMap<usize, QueuePair>,
    queues: HashMap<usize, CompletionQueue>,
    /// Regions by their index, which is the upper part of both keys.
    regions: HashMap<u32, Region>,
    domains: HashSet<usize>,
    context: usize,
    last: u32,
    /// Identifiers whose next use of their queue pair is delayed.
    held_up: HashSet<usize>,
    /// Ports of listeners whose clients do not confirm connections.
    unconfirmed: HashSet<u16>,
    /// Per identifier: objects that were used after their destruction, or destroyed during use.
    violations: HashMap<usize, Vec<String>>,
}

struct QueuePair {
    id: usize,
    domain: usize,
    state: QueuePairState,
    access: u32,
    send: usize,
    receive: usize,
    capacities: [usize; 2],
    peer: Option<usize>,
    /// Retries of a send that finds no receive. 0 means none; every other value means without limit.
    rnr_retry: u8,
    requests: VecDeque<queues::Request>,
    receives: VecDeque<queues::Receive>,
    /// Set instead of freeing the memory, so that a later use is detected.
    is_freed: bool,
}

struct CompletionQueue {
    channel: c_int,
    entries: VecDeque<ibv_wc>,
    is_armed: bool,
}

struct Region {
    domain: usize,
    address: u64,
    len: u64,
    access: u32,
}

impl World {
    fn number(&mut self) -> u32 {
        self.last += 1;
        self.last
    }

    fn violation(&mut self, id: usize, what: &str) {
        self.violations.entry(id).or_default().push(what.to_owned());
    }
}

fn world() -> MutexGuard<'static, World> {
    WORLD.lock()
}

/// Allocates a C object and returns its pointer for the binding.
fn object<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

fn zeroed<T>() -> T {
    // SAFETY: only called for C structures of integers, pointers and optional functions, for which zero is valid.
    unsafe { std::mem::zeroed() }
}

fn fail(errno: c_int) -> c_int {
    // SAFETY: `errno` belongs to this thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// A semaphore descriptor: readable once per notification.
fn descriptor() -> c_int {
    // SAFETY: the call has no preconditions.
    unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_SEMAPHORE | libc::EFD_CLOEXEC) }
}

fn notify(fd: c_int) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: the bytes are readable during the call.
    unsafe { libc::write(fd, one.as_ptr().cast(), one.len()) };
}

/// Consumes one notification. Returns false if there is none (EAGAIN).
fn take(fd: c_int) -> bool {
    let mut bytes = [0u8; 8];
    // SAFETY: the bytes are writable during the call.
    unsafe { libc::read(fd, bytes.as_mut_ptr().cast(), bytes.len()) == 8 }
}

/// The only device, created by the first call.
fn context() -> *mut ibv_context {
    let mut world = world();
    if world.context == 0 {
        let mut context: ibv_context = zeroed();
        context.async_fd = descriptor();
        context.ops.poll_cq = Some(queues::poll_cq);
        context.ops.req_notify_cq = Some(queues::req_notify_cq);
        context.ops.post_send = Some(queues::post_send);
        context.ops.post_recv = Some(queues::post_recv);
        world.context = object(context).expose_provenance();
    }
    std::ptr::with_exposed_provenance_mut(world.context)
}

fn verbs() -> Verbs {
    Verbs {
        ibv_get_device_list,
        ibv_free_device_list,
        ibv_get_device_name,
        ibv_open_device,
        ibv_close_device,
        ibv_query_device,
        ibv_query_port,
        ibv_alloc_pd,
        ibv_dealloc_pd,
        ibv_reg_mr,
        ibv_dereg_mr,
        ibv_create_comp_channel: queues::ibv_create_comp_channel,
        ibv_destroy_comp_channel: queues::ibv_destroy_comp_channel,
        ibv_create_cq: queues::ibv_create_cq,
        ibv_destroy_cq: queues::ibv_destroy_cq,
        ibv_get_cq_event: queues::ibv_get_cq_event,
        ibv_ack_cq_events: queues::ibv_ack_cq_events,
        ibv_modify_qp: queues::ibv_modify_qp,
        ibv_get_async_event,
        ibv_ack_async_event,
    }
}

unsafe extern "C" fn ibv_get_device_list(_: *mut c_int) -> *mut *mut ibv_device {
    fail(libc::ENOSYS);
    std::ptr::null_mut()
}

unsafe extern "C" fn ibv_free_device_list(_: *mut *mut ibv_device) {}

unsafe extern "C" fn ibv_get_device_name(_: *mut ibv_device) -> *const c_char {
    c"mock0".as_ptr()
}

unsafe extern "C" fn ibv_open_device(_: *mut ibv_device) -> *mut ibv_context {
    std::ptr::null_mut()
}

unsafe extern "C" fn ibv_close_device(_: *mut ibv_context) -> c_int {
    0
}

unsafe extern "C" fn ibv_query_device(_: *mut ibv_context, _: *mut ibv_device_attr) -> c_int {
    0
}

unsafe extern "C" fn ibv_query_port(_: *mut ibv_context, _: u8, attributes: *mut ibv_port_attr) -> c_int {
    // SAFETY: the caller passes a structure to fill.
    let attributes = unsafe { &mut *attributes };
    (attributes.state, attributes.max_msg_sz) = (IBV_PORT_ACTIVE, 1 << 30);
    0
}

unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let domain = object(ibv_pd { context, handle: 0 });
    world().domains.insert(domain.addr());
    domain
}

unsafe extern "C" fn ibv_dealloc_pd(domain: *mut ibv_pd) -> c_int {
    let mut world = world();
    let is_used = world.pairs.values().any(|pair| !pair.is_freed && pair.domain == domain.addr())
        || world.regions.values().any(|region| region.domain == domain.addr());
    if is_used {
        world.violation(0, "a protection domain was freed before its objects");
        return libc::EBUSY;
    }
    world.domains.remove(&domain.addr());
    0
}

unsafe extern "C" fn ibv_reg_mr(
    domain: *mut ibv_pd,
    at: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut ibv_mr {
    let (access, mut world) = (access as u32, world());
    let is_wrong = access & IBV_ACCESS_REMOTE_WRITE != 0 && access & IBV_ACCESS_LOCAL_WRITE == 0;
    if is_wrong || !world.domains.contains(&domain.addr()) {
        fail(libc::EINVAL);
        return std::ptr::null_mut();
    }
    let index = world.number();
    let address = at.expose_provenance() as u64;
    world.regions.insert(index, Region { domain: domain.addr(), address, len: len as u64, access });
    let mut region: ibv_mr = zeroed();
    (region.pd, region.addr, region.length, region.handle) = (domain, at, len, index);
    (region.lkey, region.rkey) = (index << 8 | 0x10, index << 8 | 0x80);
    object(region)
}

unsafe extern "C" fn ibv_dereg_mr(region: *mut ibv_mr) -> c_int {
    // SAFETY: allocated by `ibv_reg_mr`, and freed once.
    let region = unsafe { Box::from_raw(region) };
    match world().regions.remove(&region.handle) {
        Some(_) => 0,
        None => libc::EINVAL,
    }
}

unsafe extern "C" fn ibv_get_async_event(_: *mut ibv_context, _: *mut ibv_async_event) -> c_int {
    fail(libc::EAGAIN)
}

unsafe extern "C" fn ibv_ack_async_event(_: *mut ibv_async_event) {}
