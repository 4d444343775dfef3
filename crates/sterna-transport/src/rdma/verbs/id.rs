//! Identifiers and event channels of the connection manager.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use rustix::event::PollFlags;
use rustix::fs::{OFlags, fcntl_setfl};

use super::abi::*;
use super::errno::failed;
use super::library::Library;
use super::sockaddr;
use crate::cancel::CancelFlag;
use crate::cancel::{Waited, wait};
use crate::rdma::error::RdmaError;

/// A channel that delivers the events of identifiers. Reading it never blocks.
#[derive(Debug)]
pub(crate) struct EventChannel {
    library: &'static Library,
    raw: NonNull<rdma_event_channel>,
}

// SAFETY: librdmacm's functions are thread-safe.
unsafe impl Send for EventChannel {}
// SAFETY: as above; several threads may read one channel.
unsafe impl Sync for EventChannel {}

/// A connection manager's event, copied and acknowledged.
#[derive(Debug)]
pub(crate) struct CmEvent {
    pub(crate) kind: u32,
    pub(crate) status: i32,
    /// Private data of a connect request, a reply or a reject; otherwise empty.
    pub(crate) private_data: Vec<u8>,
    /// The new identifier of a connect request.
    pub(crate) request: Option<Id>,
}

impl EventChannel {
    /// Creates a non-blocking channel. `address` appears in errors.
    pub(crate) fn new(library: &'static Library, address: &str) -> Result<Arc<Self>, RdmaError> {
        // SAFETY: the call has no preconditions.
        let raw = unsafe { (library.manager.rdma_create_event_channel)() };
        let Some(raw) = NonNull::new(raw) else {
            return Err(match io::Error::last_os_error() {
                source if matches!(source.raw_os_error(), Some(libc::ENODEV | libc::ENOENT)) => {
                    RdmaError::NoDevice { address: address.to_owned(), having: Vec::new() }
                }
                source => super::errno::error(address, "rdma_create_event_channel", source),
            });
        };
        let channel = Arc::new(Self { library, raw });
        fcntl_setfl(channel.as_fd(), OFlags::NONBLOCK)
            .map_err(|errno| super::errno::error(address, "fcntl", errno.into()))?;
        Ok(channel)
    }

    /// The next event; `None` if there is none. Events of an identifier with a queue pair are read through `Queues`.
    pub(crate) fn next(self: &Arc<Self>) -> io::Result<Option<CmEvent>> {
        let (library, mut event) = (self.library, ptr::null_mut());
        // SAFETY: the channel is open; the event is written before the call returns 0. The call changes the queue
        // pair of the event's identifier, and that queue pair exists. On a shared channel (a listener's) no
        // identifier has a queue pair: neither the listener nor requests that were not opened. All other channels
        // are read by `Queues::next_event`, which keeps the queue pair. No identifier is destroyed meanwhile,
        // because `rdma_destroy_id` waits for events that were read and not acknowledged.
        if unsafe { (library.manager.rdma_get_cm_event)(self.raw.as_ptr(), &raw mut event) } != 0 {
            return match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                error => Err(error),
            };
        }
        // SAFETY: the library has just returned the pointer, which is valid until the event is acknowledged below.
        let raw = unsafe { &*event };
        let kind = raw.event;
        let carries = [RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_REJECTED];
        // SAFETY: for a reliable connection these events have the member `conn`. Its pointer leads to as many bytes as
        // its length says.
        let private_data = unsafe {
            match raw.param.conn {
                conn if carries.contains(&kind) && !conn.private_data.is_null() => {
                    let len = usize::from(conn.private_data_len);
                    std::slice::from_raw_parts(conn.private_data.cast::<u8>(), len).to_vec()
                }
                _ => Vec::new(),
            }
        };
        let request = (kind == RDMA_CM_EVENT_CONNECT_REQUEST).then(|| NonNull::new(raw.id)).flatten();
        // The library created this identifier for the listener's owner.
        let request = request.map(|raw| Id { library, raw, channel: Mutex::new(self.clone()) });
        let status = raw.status;
        // SAFETY: the library returned the event, it is acknowledged once, and nothing refers to it any more.
        unsafe { (library.manager.rdma_ack_cm_event)(event) };
        Ok(Some(CmEvent { kind, status, private_data, request }))
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open while the channel exists, which is as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: no identifier uses the channel any more, because each identifier keeps its channel alive.
        unsafe { (self.library.manager.rdma_destroy_event_channel)(self.raw.as_ptr()) };
    }
}

/// An identifier of librdmacm: the equivalent of a TCP socket.
pub(crate) struct Id {
    library: &'static Library,
    raw: NonNull<rdma_cm_id>,
    channel: Mutex<Arc<EventChannel>>,
}

// SAFETY: librdmacm's functions are thread-safe, also for the same identifier.
unsafe impl Send for Id {}
// SAFETY: as above.
unsafe impl Sync for Id {}

impl Id {
    pub(crate) fn new(library: &'static Library, channel: &Arc<EventChannel>) -> Result<Self, RdmaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the channel is open; the identifier is written before the call returns 0.
        let result = unsafe {
            (library.manager.rdma_create_id)(channel.raw.as_ptr(), &raw mut raw, ptr::null_mut(), RDMA_PS_TCP)
        };
        match NonNull::new(raw) {
            Some(raw) if result == 0 => Ok(Self { library, raw, channel: Mutex::new(channel.clone()) }),
            _ => Err(failed("connection manager", "rdma_create_id")),
        }
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.library
    }

    pub(crate) fn raw(&self) -> *mut rdma_cm_id {
        self.raw.as_ptr()
    }

    pub(crate) fn channel(&self) -> Arc<EventChannel> {
        self.channel.lock().clone()
    }

    /// The context of the device; null until the address is bound to a device.
    pub(crate) fn context(&self) -> *mut ibv_context {
        // SAFETY: the identifier lives as long as `self`. Only binding and resolving write the field. Both happen
        // once, before other threads can access the identifier.
        unsafe { (*self.raw()).verbs }
    }

    /// Number of the device's port.
    pub(crate) fn port_number(&self) -> u8 {
        // SAFETY: as above.
        unsafe { (*self.raw()).port_num }
    }

    /// Local address, with the port that the system chose.
    pub(crate) fn local_address(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        let mut address = sockaddr::from_c(unsafe { &(*self.raw()).route.addr.src_storage })?;
        // SAFETY: the identifier exists.
        let port = unsafe { (self.library.manager.rdma_get_src_port)(self.raw()) };
        address.set_port(u16::from_be(port));
        Some(address)
    }

    /// Address of the peer.
    pub(crate) fn peer_address(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        sockaddr::from_c(unsafe { &(*self.raw()).route.addr.dst_storage })
    }

    pub(crate) fn set_option(&self, option: i32, value: i32) -> io::Result<()> {
        let mut value = value;
        let at = (&raw mut value).cast();
        // SAFETY: the value is an int, as these options require, and is only read.
        let result = unsafe {
            (self.library.manager.rdma_set_option)(self.raw(), RDMA_OPTION_ID, option, at, size_of::<i32>())
        };
        of_c(result)
    }

    pub(crate) fn bind(&self, address: SocketAddr) -> io::Result<()> {
        let mut c = sockaddr::to_c(address);
        // SAFETY: the address structure matches its family, and is only read.
        of_c(unsafe { (self.library.manager.rdma_bind_addr)(self.raw(), (&raw mut c).cast()) })
    }

    pub(crate) fn listen(&self, backlog: i32) -> io::Result<()> {
        // SAFETY: the identifier exists.
        of_c(unsafe { (self.library.manager.rdma_listen)(self.raw(), backlog) })
    }

    /// Starts to resolve the address; an event reports the result.
    pub(crate) fn resolve_address(&self, peer: SocketAddr, milliseconds: i32) -> io::Result<()> {
        let mut c = sockaddr::to_c(peer);
        let call = self.library.manager.rdma_resolve_addr;
        // SAFETY: the address structure matches its family, and is only read. No source address is given.
        of_c(unsafe { call(self.raw(), ptr::null_mut(), (&raw mut c).cast(), milliseconds) })
    }

    /// Starts to resolve the route; an event reports the result.
    pub(crate) fn resolve_route(&self, milliseconds: i32) -> io::Result<()> {
        // SAFETY: the identifier exists.
        of_c(unsafe { (self.library.manager.rdma_resolve_route)(self.raw(), milliseconds) })
    }

    /// Moves the identifier to its own event channel.
    pub(crate) fn migrate(&self, channel: Arc<EventChannel>) -> io::Result<()> {
        // SAFETY: both exist; all events of this identifier that were read have been acknowledged.
        of_c(unsafe { (self.library.manager.rdma_migrate_id)(self.raw(), channel.raw.as_ptr()) })?;
        *self.channel.lock() = channel;
        Ok(())
    }

    pub(crate) fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        let (at, len) = (private_data.as_ptr().cast(), private_data.len() as u8);
        // SAFETY: the bytes exist during the call, which copies them.
        of_c(unsafe { (self.library.manager.rdma_reject)(self.raw(), at, len) })
    }

    /// Waits for the next event. A cancelled wait returns no event, even if one is available.
    pub(crate) fn wait(&self, deadline: Option<Instant>, cancel: &[&CancelFlag]) -> io::Result<CmWait> {
        let channel = self.channel();
        loop {
            if cancel.iter().any(|flag| flag.is_cancelled()) {
                return Ok(CmWait::Cancelled);
            }
            if let Some(event) = channel.next()? {
                return Ok(CmWait::Event(event));
            }
            match wait(channel.as_fd(), PollFlags::IN, cancel, deadline)? {
                Waited::Ready => {}
                Waited::Cancelled => return Ok(CmWait::Cancelled),
                Waited::TimedOut => return Ok(CmWait::TimedOut),
            }
        }
    }
}

/// Outcome of a wait for an event.
#[derive(Debug)]
pub(crate) enum CmWait {
    Event(CmEvent),
    Cancelled,
    TimedOut,
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: destroyed once. Its queue pair is destroyed (by `queues`), its events are acknowledged, and its
        // channel is still open.
        unsafe { (self.library.manager.rdma_destroy_id)(self.raw()) };
    }
}

impl std::fmt::Debug for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Id")
            .field("local", &self.local_address())
            .field("peer", &self.peer_address())
            .finish()
    }
}

/// Converts a C result: 0, or −1 with `errno`.
pub(crate) fn of_c(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
