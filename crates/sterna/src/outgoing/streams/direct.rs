//! A stopped device's save thread writes its chunks itself, on any channel that is free: the chunk is still in its
//! processor's cache, and nobody has to be woken. While the guest runs lanes write them, so that pages have their share.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use sterna_transport::Channel;

use super::super::shared::Shared;
use crate::error::MigrationError;

/// The multifd channels, of which each save thread takes one for a chunk.
pub(super) struct Channels {
    all: Vec<Arc<Channel>>,
    /// Those that no save thread has. The one given back last is taken first: fewer are in use than there may be.
    free: Mutex<Vec<usize>>,
    given_back: Condvar,
}

impl Channels {
    pub fn new(all: Vec<Arc<Channel>>) -> Self {
        let free = Mutex::new((0..all.len()).rev().collect());
        Self { all, free, given_back: Condvar::new() }
    }

    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Writes a chunk's packet; waits until a channel is free.
    pub fn write(&self, shared: &Shared, packet: &[u8]) -> Result<(), MigrationError> {
        let bytes = packet.len() as u64;
        let counters = &shared.counters;
        counters.throttled(shared.limiter.take(bytes));
        counters.moving(|| {
            let channel = self.take();
            let written = {
                // A lane may still write pages there.
                let _turn = self.all[channel].turn();
                self.all[channel].write_all(packet)
            };
            self.give_back(channel);
            written
        })?;
        counters.multifd(bytes);
        counters.chunk(bytes);
        Ok(())
    }

    fn take(&self) -> usize {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(channel) = free.pop() {
                return channel;
            }
            free = self.given_back.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn give_back(&self, channel: usize) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(channel);
        self.given_back.notify_one();
    }
}
