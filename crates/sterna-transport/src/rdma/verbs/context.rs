//! A device that librdmacm has opened, and its asynchronous events.

use std::collections::HashMap;
use std::ffi::CStr;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;
use rustix::fs::{OFlags, fcntl_setfl};

use super::abi::*;
use super::events::{self, Mailbox};
use super::id::{EventChannel, Id};
use super::library::Library;
use crate::rdma::error::RdmaError;

/// An opened device. There is one value per device and process, because its events can be read only once.
pub(crate) struct Context {
    library: &'static Library,
    raw: NonNull<ibv_context>,
    name: String,
    subscribers: Mutex<Vec<Subscriber>>,
    /// An identifier bound to the device. librdmacm may close a device without one, so this one lives as long as
    /// `self`.
    _anchor: Id,
}

struct Subscriber {
    queue_pair: usize,
    port: u8,
    mailbox: Weak<Mailbox>,
}

// SAFETY: libibverbs' functions are thread-safe, and `_anchor` keeps the pointer valid.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

static CONTEXTS: LazyLock<Mutex<HashMap<usize, Weak<Context>>>> = LazyLock::new(Mutex::default);

impl Context {
    /// The device that `id` is bound to, opened once per process.
    pub(crate) fn of(id: &Id) -> Result<Arc<Self>, RdmaError> {
        let library = id.library();
        let local = id.local_address();
        let subject = local.map_or_else(|| "an address".to_owned(), |address| address.to_string());
        let (Some(raw), Some(local)) = (NonNull::new(id.context()), local) else {
            return Err(RdmaError::NoDevice { address: subject, having: Vec::new() });
        };
        let mut contexts = CONTEXTS.lock();
        if let Some(context) = contexts.get(&raw.addr().get()).and_then(Weak::upgrade) {
            return Ok(context);
        }
        let anchor = anchor(library, local, &subject)?;
        // SAFETY: the device is open because `id` is bound to it. The library's string lives as long as the device.
        let name = unsafe { CStr::from_ptr((library.verbs.ibv_get_device_name)((*raw.as_ptr()).device)) };
        let context = Arc::new(Self {
            library,
            raw,
            name: name.to_string_lossy().into_owned(),
            subscribers: Mutex::default(),
            _anchor: anchor,
        });
        fcntl_setfl(context.as_fd(), OFlags::NONBLOCK)
            .map_err(|errno| super::errno::error(&context.name, "fcntl", errno.into()))?;
        contexts.insert(raw.addr().get(), Arc::downgrade(&context));
        Ok(context)
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.library
    }

    pub(crate) fn raw(&self) -> *mut ibv_context {
        self.raw.as_ptr()
    }

    /// Name of the device, for example `mlx5_0`.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Delivers events of the queue pair or port to `mailbox` while that exists.
    pub(crate) fn subscribe(&self, queue_pair: *mut ibv_qp, port: u8, mailbox: &Arc<Mailbox>) {
        let mut subscribers = self.subscribers.lock();
        subscribers.retain(|subscriber| subscriber.mailbox.strong_count() > 0);
        subscribers.push(Subscriber {
            queue_pair: queue_pair.addr(),
            port,
            mailbox: Arc::downgrade(mailbox),
        });
    }

    /// Reads the device's events and delivers them to the subscribers concerned. Does not wait.
    pub(crate) fn dispatch(&self) {
        let subscribers = self.subscribers.lock();
        let mut event = ibv_async_event { element: std::ptr::null_mut(), event_type: 0 };
        // SAFETY: the device is open, its descriptor does not block, and the event is written before the call
        // returns 0.
        while unsafe { (self.library.verbs.ibv_get_async_event)(self.raw(), &raw mut event) } == 0 {
            let (kind, element) = (event.event_type, event.element.addr());
            // SAFETY: the library returned the event, and it is acknowledged once. Destroying a queue pair waits
            // for that.
            unsafe { (self.library.verbs.ibv_ack_async_event)(&raw mut event) };
            let Some(event) = events::of_device(kind) else { continue };
            for subscriber in subscribers.iter().filter(|subscriber| subscriber.is_concerned(kind, element)) {
                if let Some(mailbox) = subscriber.mailbox.upgrade() {
                    mailbox.put(event.clone());
                }
            }
        }
    }
}

impl Subscriber {
    fn is_concerned(&self, kind: u32, element: usize) -> bool {
        match kind {
            IBV_EVENT_PORT_ACTIVE | IBV_EVENT_PORT_ERR => element as u32 == u32::from(self.port),
            // The completion queue's connection is not recorded, because such an event is a bug of this program.
            IBV_EVENT_DEVICE_FATAL | IBV_EVENT_CQ_ERR => true,
            _ => element == self.queue_pair,
        }
    }
}

impl AsFd for Context {
    /// Readable when there are events to dispatch.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the device, and therefore its descriptor, is open as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("device", &self.name).finish()
    }
}

fn anchor(library: &'static Library, local: SocketAddr, subject: &str) -> Result<Id, RdmaError> {
    let channel = EventChannel::new(library, subject)?;
    let id = Id::new(library, &channel)?;
    let mut any_port = local;
    any_port.set_port(0);
    id.bind(any_port).map_err(|source| super::errno::error(subject, "rdma_bind_addr", source))?;
    Ok(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_concern_their_queue_pair_or_port_only() {
        let subscriber = Subscriber { queue_pair: 0x1000, port: 2, mailbox: Weak::new() };

        assert!(subscriber.is_concerned(IBV_EVENT_QP_ACCESS_ERR, 0x1000));
        assert!(!subscriber.is_concerned(IBV_EVENT_QP_ACCESS_ERR, 2));
        assert!(subscriber.is_concerned(IBV_EVENT_PORT_ERR, 2));
        assert!(!subscriber.is_concerned(IBV_EVENT_PORT_ERR, 1));
        assert!(subscriber.is_concerned(IBV_EVENT_DEVICE_FATAL, 0));
    }
}
