//! A stopped device's save thread writes its chunks itself, on any channel that is free: the chunk is still in its
//! processor's cache, and nobody has to be woken. While the guest runs lanes write them, so that pages have their share.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use sterna_transport::Channel;

use super::super::shared::Shared;
use crate::error::MigrationError;

/// The multifd channels, of which each save thread takes one for a chunk.
pub(super) struct Channels {
    all: Vec<Arc<Channel>>,
    /// Whether a save thread has it.
    taken: Mutex<Vec<bool>>,
    given_back: Condvar,
}

impl Channels {
    pub(super) fn new(all: Vec<Arc<Channel>>) -> Self {
        let taken = Mutex::new(vec![false; all.len()]);
        Self { all, taken, given_back: Condvar::new() }
    }

    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    /// Writes a chunk's packet of device `index` on its own channel, or on the next that is free; waits for one.
    pub(super) fn write(&self, shared: &Shared, index: usize, packet: &[u8]) -> Result<(), MigrationError> {
        let bytes = packet.len() as u64;
        let counters = &shared.counters;
        counters.throttled(shared.limiter.take(bytes));
        counters.moving(|| {
            let channel = self.take(index);
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

    fn take(&self, index: usize) -> usize {
        let count = self.all.len();
        let mut taken = self.taken.lock();
        loop {
            let mut from_own = (0..count).map(|at| (index + at) % count);
            if let Some(channel) = from_own.find(|channel| !taken[*channel]) {
                taken[channel] = true;
                return channel;
            }
            self.given_back.wait(&mut taken);
        }
    }

    fn give_back(&self, channel: usize) {
        self.taken.lock()[channel] = false;
        self.given_back.notify_one();
    }
}
