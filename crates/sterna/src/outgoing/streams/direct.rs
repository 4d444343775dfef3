//! Lets the save thread of a stopped device write its chunks itself.
//!
//! It uses any free multifd channel.
//!
//! The chunk is still in its processor's cache, and no lane has to be woken. While the guest runs, lanes write
//! chunks, so that pages get their share of the network.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use sterna_transport::Channel;

use super::super::shared::Shared;
use crate::error::MigrationError;

/// The multifd channels. A save thread takes one for each chunk.
pub(super) struct Channels {
    all: Vec<Arc<Channel>>,
    /// For each channel, whether a save thread has taken it.
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

    /// Writes a chunk's packet of device `index` on a free channel, or waits for one.
    ///
    /// It tries the device's own channel first, then the next ones.
    pub(super) fn write(&self, shared: &Shared, index: usize, packet: &[u8]) -> Result<(), MigrationError> {
        let bytes = packet.len() as u64;
        let counters = &shared.measures.counters;
        counters.throttled(shared.session.limiter.take(bytes));
        counters.moving(|| {
            let channel = self.take(index);
            let written = {
                // A lane may still write pages on this channel.
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
