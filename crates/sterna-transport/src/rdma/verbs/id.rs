//! The connection manager's identifiers and event channels.

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
use super::library::Library;
use super::{failed, sockaddr};
use crate::CancelFlag;
use crate::cancel::{Waited, wait};
use crate::rdma::RdmaError;

/// Where events of identifiers arrive. Reading it never blocks.
#[derive(Debug)]
pub(crate) struct EventChannel {
    library: &'static Library,
    raw: NonNull<rdma_event_channel>,
}

// SAFETY: librdmacm's functions may be called from any thread.
unsafe impl Send for EventChannel {}
// SAFETY: as above; several threads may read one channel.
unsafe impl Sync for EventChannel {}

/// An event that has been acknowledged.
#[derive(Debug)]
pub(crate) struct CmEvent {
    pub(crate) kind: u32,
    pub(crate) status: i32,
    /// Of a connect request, a reply or a reject; else empty.
    pub(crate) private_data: Vec<u8>,
    /// A connect request's own identifier.
    pub(crate) request: Option<Id>,
}

impl EventChannel {
    /// `address` is what it is for: to be named in an error.
    pub(crate) fn new(library: &'static Library, address: &str) -> Result<Arc<Self>, RdmaError> {
        // SAFETY: the call needs nothing.
        let raw = unsafe { (library.manager.rdma_create_event_channel)() };
        let Some(raw) = NonNull::new(raw) else {
            return Err(match io::Error::last_os_error() {
                source if matches!(source.raw_os_error(), Some(libc::ENODEV | libc::ENOENT)) => {
                    RdmaError::NoDevice { address: address.to_owned(), having: Vec::new() }
                }
                source => super::error(address, "rdma_create_event_channel", source),
            });
        };
        let channel = Arc::new(Self { library, raw });
        fcntl_setfl(channel.as_fd(), OFlags::NONBLOCK)
            .map_err(|errno| super::error(address, "fcntl", errno.into()))?;
        Ok(channel)
    }

    /// The next event, if there is one.
    pub(crate) fn next(self: &Arc<Self>) -> io::Result<Option<CmEvent>> {
        let (library, mut event) = (self.library, ptr::null_mut());
        // SAFETY: the channel is open; the event is written before the call returns 0.
        if unsafe { (library.manager.rdma_get_cm_event)(self.raw.as_ptr(), &raw mut event) } != 0 {
            return match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                error => Err(error),
            };
        }
        // SAFETY: the library has just given it to us; it is valid until it is acknowledged, below.
        let raw = unsafe { &*event };
        let kind = raw.event;
        let carries = [RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_REJECTED];
        // SAFETY: these events of a reliable connection have the member `conn`, and its pointer leads to as many bytes as it says.
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
        // The library made this identifier for us.
        let request = request.map(|raw| Id { library, raw, channel: Mutex::new(self.clone()) });
        let status = raw.status;
        // SAFETY: it was given to us and is acknowledged once; nothing refers to it any more.
        unsafe { (library.manager.rdma_ack_cm_event)(event) };
        Ok(Some(CmEvent { kind, status, private_data, request }))
    }
}

impl AsFd for EventChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel is, which is as long as `self`.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: no identifier is left on it: each keeps its channel.
        unsafe { (self.library.manager.rdma_destroy_event_channel)(self.raw.as_ptr()) };
    }
}

/// An identifier: what sockets are to TCP.
pub(crate) struct Id {
    library: &'static Library,
    raw: NonNull<rdma_cm_id>,
    channel: Mutex<Arc<EventChannel>>,
}

// SAFETY: librdmacm's functions may be called from any thread, for the same identifier, too.
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

    /// The device's context; null until the address is bound to a device.
    pub(crate) fn context(&self) -> *mut ibv_context {
        // SAFETY: the identifier lives as long as `self`. Only binding and resolving write the field, which happen once, before
        // other threads get to know the identifier.
        unsafe { (*self.raw()).verbs }
    }

    /// The device's port.
    pub(crate) fn port_number(&self) -> u8 {
        // SAFETY: as above.
        unsafe { (*self.raw()).port_num }
    }

    /// This side's address.
    pub(crate) fn local_address(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        let mut address = sockaddr::from_c(unsafe { &(*self.raw()).route.addr.src_storage })?;
        // SAFETY: the identifier lives.
        let port = unsafe { (self.library.manager.rdma_get_src_port)(self.raw()) };
        address.set_port(u16::from_be(port));
        Some(address)
    }

    /// The other side's address.
    pub(crate) fn peer_address(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        sockaddr::from_c(unsafe { &(*self.raw()).route.addr.dst_storage })
    }

    pub(crate) fn set_option(&self, option: i32, value: i32) -> io::Result<()> {
        let mut value = value;
        let at = (&raw mut value).cast();
        // SAFETY: the value is an int, as these options want it, and is only read.
        let result = unsafe {
            (self.library.manager.rdma_set_option)(self.raw(), RDMA_OPTION_ID, option, at, size_of::<i32>())
        };
        of_c(result)
    }

    pub(crate) fn bind(&self, address: SocketAddr) -> io::Result<()> {
        let mut c = sockaddr::to_c(address);
        // SAFETY: the address is of the kind that its family says, and is only read.
        of_c(unsafe { (self.library.manager.rdma_bind_addr)(self.raw(), (&raw mut c).cast()) })
    }

    pub(crate) fn listen(&self, backlog: i32) -> io::Result<()> {
        // SAFETY: the identifier lives.
        of_c(unsafe { (self.library.manager.rdma_listen)(self.raw(), backlog) })
    }

    /// Begins; an event follows.
    pub(crate) fn resolve_address(&self, peer: SocketAddr, milliseconds: i32) -> io::Result<()> {
        let mut c = sockaddr::to_c(peer);
        let call = self.library.manager.rdma_resolve_addr;
        // SAFETY: the address is of the kind that its family says, and is only read; no source address is asked for.
        of_c(unsafe { call(self.raw(), ptr::null_mut(), (&raw mut c).cast(), milliseconds) })
    }

    /// Begins; an event follows.
    pub(crate) fn resolve_route(&self, milliseconds: i32) -> io::Result<()> {
        // SAFETY: the identifier lives.
        of_c(unsafe { (self.library.manager.rdma_resolve_route)(self.raw(), milliseconds) })
    }

    /// Moves to a channel that is this identifier's alone.
    pub(crate) fn migrate(&self, channel: Arc<EventChannel>) -> io::Result<()> {
        // SAFETY: both live; events of this identifier that were fetched have been acknowledged.
        of_c(unsafe { (self.library.manager.rdma_migrate_id)(self.raw(), channel.raw.as_ptr()) })?;
        *self.channel.lock() = channel;
        Ok(())
    }

    /// Begins; an event follows.
    pub(crate) fn connect(&self, parameters: &mut rdma_conn_param) -> io::Result<()> {
        // SAFETY: its private data is alive for the call, which copies it.
        of_c(unsafe { (self.library.manager.rdma_connect)(self.raw(), parameters) })
    }

    /// Begins; an event follows.
    pub(crate) fn accept(&self, parameters: &mut rdma_conn_param) -> io::Result<()> {
        // SAFETY: as above.
        of_c(unsafe { (self.library.manager.rdma_accept)(self.raw(), parameters) })
    }

    pub(crate) fn reject(&self, private_data: &[u8]) -> io::Result<()> {
        let (at, len) = (private_data.as_ptr().cast(), private_data.len() as u8);
        // SAFETY: the bytes are alive for the call, which copies them.
        of_c(unsafe { (self.library.manager.rdma_reject)(self.raw(), at, len) })
    }

    /// Puts the queue pair into the error state and tells the peer, or answers it.
    pub(crate) fn disconnect(&self) {
        // SAFETY: the identifier lives. It fails if the connection is over, which is what we want.
        unsafe { (self.library.manager.rdma_disconnect)(self.raw()) };
    }

    /// Waits for the next event. What is cancelled gets none, even if one is there.
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

/// How a wait for an event ended.
#[derive(Debug)]
pub(crate) enum CmWait {
    Event(CmEvent),
    Cancelled,
    TimedOut,
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: it is destroyed once; its queue pair is destroyed (`queues` does), its events are acknowledged, and its channel
        // is still open.
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

/// C's word for it: 0, or −1 with `errno`.
pub(crate) fn of_c(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
