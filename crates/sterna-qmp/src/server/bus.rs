//! Events to all clients, and each client's bytes that wait to be written.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use serde_json::{Value, json};

use crate::framing::to_line;

/// What a client may leave unread before it is disconnected.
pub const MAX_UNREAD_BYTES: usize = 4 << 20;

/// Sends events to every client of the servers that share it. Clone it freely.
#[derive(Clone, Default)]
pub struct EventBus {
    clients: Arc<Mutex<Vec<Weak<Outbox>>>>,
}

impl EventBus {
    /// A bus without clients.
    pub fn new() -> Self {
        Self::default()
    }

    /// Tells every negotiated client that `name` happened just now. Never waits for one.
    pub fn emit(&self, name: &str, data: Option<Value>) {
        // The lock is held to the end so that all clients see events in one order.
        let mut clients = self.clients.lock();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut event = json!({
            "timestamp": {"seconds": since.as_secs(), "microseconds": since.subsec_micros()},
            "event": name,
        });
        if let (Some(data), Some(event)) = (data, event.as_object_mut()) {
            event.insert("data".into(), data);
        }
        let line = to_line(&event);
        clients.retain(|client| match client.upgrade() {
            Some(client) => {
                client.event(&line);
                true
            }
            None => false,
        });
    }

    pub(crate) fn join(&self, client: &Arc<Outbox>) {
        let mut clients = self.clients.lock();
        clients.retain(|client| client.strong_count() > 0);
        clients.push(Arc::downgrade(client));
    }
}

/// What one client is still to be sent. Any thread adds; the client's own thread takes.
pub(crate) struct Outbox {
    queue: Mutex<Queue>,
    wake: OwnedFd,
}

#[derive(Default)]
struct Queue {
    bytes: Vec<u8>,
    negotiated: bool,
    overflowed: bool,
    closing: bool,
}

/// A look at an [`Outbox`].
pub(crate) struct OutboxState {
    pub pending_bytes: usize,
    pub overflowed: bool,
    pub closing: bool,
}

impl Outbox {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self {
            queue: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Becomes readable when something changed here.
    pub(crate) fn wake_fd(&self) -> &OwnedFd {
        &self.wake
    }

    pub(crate) fn clear_wake(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    /// Queues an answer; with `negotiates`, events may follow it.
    pub(crate) fn reply(&self, line: &[u8], negotiates: bool) {
        let mut queue = self.queue.lock();
        queue.bytes.extend_from_slice(line);
        queue.negotiated |= negotiates;
    }

    pub(crate) fn close(&self) {
        self.queue.lock().closing = true;
        self.ring();
    }

    pub(crate) fn state(&self) -> OutboxState {
        let queue = self.queue.lock();
        OutboxState { pending_bytes: queue.bytes.len(), overflowed: queue.overflowed, closing: queue.closing }
    }

    /// Gives `write` the waiting bytes and drops as many of them as it says it took.
    pub(crate) fn drain<E>(&self, write: impl FnOnce(&[u8]) -> Result<usize, E>) -> Result<(), E> {
        let mut queue = self.queue.lock();
        let written = write(&queue.bytes)?;
        queue.bytes.drain(..written);
        Ok(())
    }

    fn event(&self, line: &[u8]) {
        let mut queue = self.queue.lock();
        if !queue.negotiated || queue.overflowed {
            return;
        }
        if queue.bytes.len() + line.len() > MAX_UNREAD_BYTES {
            queue.overflowed = true;
        } else {
            queue.bytes.extend_from_slice(line);
        }
        drop(queue);
        self.ring();
    }

    fn ring(&self) {
        // Fails only when the counter is full, and then the reader is awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}
