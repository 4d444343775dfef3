//! The receiving half of an endpoint: its buffers and posted receives.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::failure::failed;
use super::sizes::place;
use crate::cancel::CancelFlag;
use crate::rdma::connection::{Connection, Queue, Wake};
use crate::rdma::error::RdmaError;
use crate::rdma::memory::Registration;
use crate::rdma::work::Completion;

/// Buffers of an endpoint for received messages.
#[derive(Debug)]
pub(super) struct Receiving {
    message_bytes: u32,
    buffers: Registration,
    /// Indices of the buffers that are not posted.
    free: Mutex<Vec<u32>>,
}

impl Receiving {
    pub(super) fn new(message_bytes: u32, buffers: Registration) -> Self {
        let count = (buffers.memory().len() / message_bytes.max(1) as usize) as u32;
        Self { message_bytes, buffers, free: Mutex::new((0..count).collect()) }
    }

    pub(super) fn post(&self, connection: &dyn Connection) -> Result<(), RdmaError> {
        let full =
            || RdmaError::QueueFull { peer: connection.peer().to_string(), queue: "receive", posted: 0 };
        let slot = self.free.lock().pop().ok_or_else(full)?;
        let into = place(&self.buffers, self.message_bytes, slot, self.message_bytes);
        let posted = connection.post_receive(slot.into(), into).inspect_err(|_| self.free.lock().push(slot));
        match posted {
            // No further messages arrive. `receive` returns the earlier ones first, and then the end.
            Err(RdmaError::Ended { event: Some(_), .. }) => Ok(()),
            other => other,
        }
    }

    pub(super) fn receive(
        &self,
        connection: &dyn Connection,
        limit: Option<Duration>,
        closed: &CancelFlag,
    ) -> Result<Option<Vec<u8>>, RdmaError> {
        let peer = || connection.peer().to_string();
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut completions = Vec::with_capacity(1);
        loop {
            if closed.is_cancelled() {
                return Err(RdmaError::Cancelled { address: peer() });
            }
            if connection.poll(Queue::Receive, &mut completions, 1)? == 1 {
                return self.take(connection, completions[0]).map(Some);
            }
            match connection.wait(Queue::Receive, deadline, closed)? {
                Wake::Completion => {}
                Wake::Ended => return Err(RdmaError::Ended { peer: peer(), event: connection.end() }),
                Wake::TimedOut => return Ok(None),
                Wake::Cancelled => return Err(RdmaError::Cancelled { address: peer() }),
            }
        }
    }

    /// Copies a message out of its buffer, and frees the buffer.
    fn take(&self, connection: &dyn Connection, completion: Completion) -> Result<Vec<u8>, RdmaError> {
        let slot = completion.id as u32;
        let message = if completion.status.is_success() {
            let mut bytes = vec![0; completion.bytes.min(self.message_bytes) as usize];
            let offset = slot as usize * self.message_bytes as usize;
            let window = self.buffers.memory().slice().part(offset, bytes.len());
            let copied = window.map_or(Ok(()), |window| window.copy_to(&mut bytes));
            copied.map(|()| bytes).map_err(|fault| RdmaError::System {
                subject: connection.peer().to_string(),
                call: "reading a message",
                source: std::io::Error::other(fault),
            })
        } else {
            Err(failed(connection, "a receive", completion.status, None))
        };
        self.free.lock().push(slot);
        message
    }
}
