//! The contact's connection after the greeting: sends and receives authenticated messages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sterna_transport::Channel;
use sterna_wire::WireError;
use sterna_wire::replica::{ArbiterIdentity, Message, Session};

use super::error::ContactError;

/// How long a connection may have no room for a message. The primary's margin for stopping its guest includes this
/// time.
const ROOM_LIMIT: Duration = Duration::from_millis(100);

/// The connection. One thread reads; any thread may send.
pub(super) struct Link {
    channel: Arc<Channel>,
    sends: Mutex<Session>,
    reads: Mutex<Session>,
    /// Whether this side has closed the connection.
    is_closed: AtomicBool,
    /// Whether a message found the socket buffer full for the whole limit, because the peer does not read.
    is_full: AtomicBool,
}

impl Link {
    pub(super) fn new(channel: Arc<Channel>, session: Session) -> Self {
        // Each clone counts the messages of one direction.
        let (sends, reads) = (Mutex::new(session.clone()), Mutex::new(session));
        let (is_closed, is_full) = Default::default();
        Self { channel, sends, reads, is_closed, is_full }
    }

    /// Sends a message, and waits at most 100 ms for room in the socket.
    ///
    /// Messages are small, so a connection whose peer reads accepts them without waiting. The sending thread also
    /// watches the lease, so it must not wait for a peer that does not read.
    pub(super) fn send(&self, message: Message) -> Result<(), ContactError> {
        self.check_room()?;
        let mut session = self.sends.lock();
        let mut bytes = Vec::with_capacity(Message::BYTES);
        session.seal(message, &mut bytes)?;
        Ok(self.channel.write_all(&bytes)?)
    }

    fn check_room(&self) -> Result<(), ContactError> {
        let unread = || ContactError::Unread { unsent_bytes: self.channel.unsent_bytes() };
        // Without this check, every further message would wait for the limit again.
        if self.is_full.load(Ordering::Acquire) {
            return Err(unread());
        }
        let Some(socket) = self.channel.socket() else { return Ok(()) };
        let mut ready = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
        let limit = Timespec { tv_sec: 0, tv_nsec: ROOM_LIMIT.subsec_nanos().into() };
        match poll(&mut ready, Some(&limit)) {
            Ok(0) => {
                self.is_full.store(true, Ordering::Release);
                Err(unread())
            }
            // If the connection has an error, the write reports it.
            _ => Ok(()),
        }
    }

    /// Waits for the next message.
    pub(super) fn read(&self) -> Result<Message, ContactError> {
        let mut bytes = [0; Message::BYTES];
        self.channel.read_exact(&mut bytes)?;
        let read = self.reads.lock().open(&bytes)?;
        // All bytes of the message are present, so the decoder cannot need more.
        let short =
            || WireError::local("replica message", 0, "specs/replica.md §2", "it is longer than it says");
        Ok(read.ok_or_else(short)?.0)
    }

    /// Sends the identity of this side's arbiter.
    pub(super) fn send_arbiter(&self, identity: &ArbiterIdentity) -> Result<(), ContactError> {
        let mut bytes = Vec::new();
        self.sends.lock().seal_arbiter(identity, &mut bytes)?;
        Ok(self.channel.write_all(&bytes)?)
    }

    /// Waits, at most `most`, for the identity of the peer's arbiter.
    pub(super) fn read_arbiter(&self, most: Duration) -> Result<ArbiterIdentity, ContactError> {
        self.channel.set_stall_limit(Some(most));
        let mut head = [0; ArbiterIdentity::HEAD_BYTES];
        self.channel.read_exact(&mut head)?;
        let mut bytes = head.to_vec();
        bytes.resize(head.len() + ArbiterIdentity::rest_bytes(head)?, 0);
        self.channel.read_exact(&mut bytes[head.len()..])?;
        // From here on, the lease limits the waits of the contact.
        self.channel.set_stall_limit(None);
        let read = self.reads.lock().open_arbiter(&bytes)?;
        let short =
            || WireError::local("replica arbiter", 0, "specs/replica.md §1", "it is longer than it says");
        Ok(read.ok_or_else(short)?.0)
    }

    /// Whether this side has closed the connection.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.channel.shutdown();
    }
}
