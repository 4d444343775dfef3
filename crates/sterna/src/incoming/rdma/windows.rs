//! Guest memory that is registered, so that the source can write it.

use std::collections::BTreeMap;

use sterna_transport::rdma::Registration;
use sterna_wire::rdma::{BlockRange, ChunkSize};

/// Registrations of guest memory. They may overlap: each is what one request needed.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// By block and the first byte that was asked for.
    registered: BTreeMap<(usize, u64), Vec<Registration>>,
    /// Whole blocks of which nothing is pinned.
    on_demand: BTreeMap<usize, Registration>,
    made: u64,
    bytes: u64,
    is_over: bool,
}

impl Windows {
    /// The key of a window that covers `range`, if there is one. `from_its_start`: only one that begins with it.
    pub(super) fn key_for(&self, range: BlockRange, from_its_start: bool) -> Option<u32> {
        let BlockRange { block, start, length } = range;
        if let Some(key) = self.on_demand_key(block) {
            return Some(key);
        }
        // None of a source that asks chunk by chunk is longer.
        let earliest = if from_its_start { start } else { start.saturating_sub(ChunkSize::MOST.bytes()) };
        let mut near = self.registered.range((block, earliest)..=(block, start)).rev();
        let covering =
            near.find_map(|(_, windows)| windows.iter().find(|window| end(window) >= start + length));
        covering.map(Registration::rkey)
    }

    /// The key of a whole block that is registered on demand.
    pub(super) fn on_demand_key(&self, block: usize) -> Option<u32> {
        self.on_demand.get(&block).map(Registration::rkey)
    }

    /// Whether a window begins at this byte. In a block that is registered on demand one may begin anywhere.
    pub(super) fn begins_at(&self, block: usize, start: u64) -> bool {
        self.on_demand.contains_key(&block) || self.registered.contains_key(&(block, start))
    }

    /// Takes in the registration of a whole block on demand, which stays until the end. When all is over it is dropped.
    pub(super) fn add_on_demand(&mut self, block: usize, registration: Registration) {
        if !self.is_over {
            self.made += 1;
            self.on_demand.insert(block, registration);
        }
    }

    /// Takes a window in. When all is over it is dropped.
    pub(super) fn add(&mut self, (block, start): (usize, u64), window: Registration) {
        if self.is_over {
            return;
        }
        self.made += 1;
        self.bytes += window.memory().len() as u64;
        self.registered.entry((block, start)).or_default().push(window);
    }

    /// Takes out the windows that begin at this byte; dropping them deregisters.
    #[must_use]
    pub(super) fn take(&mut self, block: usize, start: u64) -> Vec<Registration> {
        let taken = self.registered.remove(&(block, start)).unwrap_or_default();
        self.bytes -= taken.iter().map(|window| window.memory().len() as u64).sum::<u64>();
        taken
    }

    /// Takes out all windows, and takes none in from now on.
    #[must_use]
    pub(super) fn end(&mut self) -> Vec<Registration> {
        self.is_over = true;
        self.bytes = 0;
        let windows = std::mem::take(&mut self.registered).into_values().flatten();
        windows.chain(std::mem::take(&mut self.on_demand).into_values()).collect()
    }

    /// Bytes that are pinned now; what two windows cover counts twice, as it does against the locked-memory limit.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Windows that were ever made.
    pub(super) fn made(&self) -> u64 {
        self.made
    }
}

/// The byte of its block after a window's last.
fn end(window: &Registration) -> u64 {
    let offset = window.memory().block().map_or(0, |(_, offset)| offset);
    offset + window.memory().len() as u64
}
