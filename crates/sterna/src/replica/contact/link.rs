//! The connection after the greeting.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use sterna_transport::Channel;
use sterna_wire::WireError;
use sterna_wire::replica::{ArbiterIdentity, Message, Session};

use super::error::ContactError;

/// One thread reads; any may send.
pub(super) struct Link {
    channel: Arc<Channel>,
    sends: Mutex<Session>,
    reads: Mutex<Session>,
    /// This side has ended it.
    is_closed: AtomicBool,
}

impl Link {
    pub(super) fn new(channel: Arc<Channel>, session: Session) -> Self {
        // Each half counts its own direction.
        let (sends, reads) = (Mutex::new(session.clone()), Mutex::new(session));
        Self { channel, sends, reads, is_closed: AtomicBool::new(false) }
    }

    /// Messages are small, and their number is limited by the lease: the connection takes them without waiting.
    pub(super) fn send(&self, message: Message) -> Result<(), ContactError> {
        let mut session = self.sends.lock();
        let mut bytes = Vec::with_capacity(Message::BYTES);
        session.seal(message, &mut bytes)?;
        Ok(self.channel.write_all(&bytes)?)
    }

    /// Waits for the next message.
    pub(super) fn read(&self) -> Result<Message, ContactError> {
        let mut bytes = [0; Message::BYTES];
        self.channel.read_exact(&mut bytes)?;
        let read = self.reads.lock().open(&bytes)?;
        // All of its bytes are there, so it cannot be missing one.
        let short =
            || WireError::local("replica message", 0, "specs/replica.md §2", "it is longer than it says");
        Ok(read.ok_or_else(short)?.0)
    }

    /// Says which arbiter this side asks.
    pub(super) fn send_arbiter(&self, identity: &ArbiterIdentity) -> Result<(), ContactError> {
        let mut bytes = Vec::new();
        self.sends.lock().seal_arbiter(identity, &mut bytes)?;
        Ok(self.channel.write_all(&bytes)?)
    }

    /// Waits, no longer than `most`, for what the peer says of its arbiter.
    pub(super) fn read_arbiter(&self, most: Duration) -> Result<ArbiterIdentity, ContactError> {
        self.channel.set_stall_limit(Some(most));
        let mut head = [0; ArbiterIdentity::HEAD_BYTES];
        self.channel.read_exact(&mut head)?;
        let mut bytes = head.to_vec();
        bytes.resize(head.len() + ArbiterIdentity::rest_bytes(head)?, 0);
        self.channel.read_exact(&mut bytes[head.len()..])?;
        // From here on the contact has times of its own.
        self.channel.set_stall_limit(None);
        let read = self.reads.lock().open_arbiter(&bytes)?;
        let short =
            || WireError::local("replica arbiter", 0, "specs/replica.md §1", "it is longer than it says");
        Ok(read.ok_or_else(short)?.0)
    }

    /// Whether this side has ended it.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.channel.shutdown();
    }
}
