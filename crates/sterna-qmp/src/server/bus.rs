//! Sends events to all clients, and keeps the unread bytes of each client.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use serde_json::{Value, json};

use super::spec::EventSpec;
use crate::framing::to_line;

/// Maximum unread bytes of a client. A client with more is disconnected.
pub const MAX_UNREAD_BYTES: usize = 4 << 20;

/// Sends events to every client of the servers that share it. Clones share the clients.
#[derive(Clone, Default)]
pub struct EventBus {
    clients: Arc<Mutex<Vec<Weak<Outbox>>>>,
}

impl EventBus {
    /// Creates a bus without clients.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sends `event` with the present time to every negotiated client. Never waits for a client.
    pub fn emit(&self, event: &EventSpec, data: Option<Value>) {
        debug_assert_eq!(event.undeclared(data.as_ref()), None);
        // Locked until the end, so that all clients get events in the same order.
        let mut clients = self.clients.lock();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut line = json!({
            "timestamp": {"seconds": since.as_secs(), "microseconds": since.subsec_micros()},
            "event": event.name,
        });
        if let (Some(data), Some(line)) = (data, line.as_object_mut()) {
            line.insert("data".into(), data);
        }
        let line = to_line(&line);
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

/// Bytes that wait for one client. Any thread adds bytes, and the client's own thread removes them.
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

/// A snapshot of an [`Outbox`].
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

    /// Becomes readable when the outbox has changed.
    pub(crate) fn wake_fd(&self) -> &OwnedFd {
        &self.wake
    }

    pub(crate) fn clear_wake(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
    }

    /// Queues an answer. With `negotiates`, events may follow it.
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

    /// Passes the waiting bytes to `write`, and removes as many as it returns.
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
        // This fails only if the counter is at its maximum. Then the reader is awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}
