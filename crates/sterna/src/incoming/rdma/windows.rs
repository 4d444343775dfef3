//! Guest memory that is registered for the source's writes.

use std::collections::BTreeMap;

use sterna_transport::rdma::Registration;
use sterna_wire::rdma::{BlockRange, ChunkSize};

/// Registrations of guest memory, one per request. They may overlap.
#[derive(Debug, Default)]
pub(super) struct Windows {
    /// By block and the first requested byte.
    registered: BTreeMap<(usize, u64), Vec<Registration>>,
    /// Whole blocks that are registered without pinning.
    on_demand: BTreeMap<usize, Registration>,
    made: u64,
    bytes: u64,
    is_over: bool,
}

impl Windows {
    /// The key of a window that covers `range`. `from_its_start`: only a window that begins with the range.
    pub(super) fn key_for(&self, range: BlockRange, from_its_start: bool) -> Option<u32> {
        let BlockRange { block, start, length } = range;
        if let Some(key) = self.on_demand_key(block) {
            return Some(key);
        }
        // No window of a source that requests chunk by chunk is longer than the largest chunk.
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

    /// Whether a window begins at this byte. A block that is registered on demand accepts every byte.
    pub(super) fn begins_at(&self, block: usize, start: u64) -> bool {
        self.on_demand.contains_key(&block) || self.registered.contains_key(&(block, start))
    }

    /// Stores the registration of a whole block on demand, until the end. After [`Windows::end`] it is dropped.
    pub(super) fn add_on_demand(&mut self, block: usize, registration: Registration) {
        if !self.is_over {
            self.made += 1;
            self.on_demand.insert(block, registration);
        }
    }

    /// Stores a window. After [`Windows::end`] it is dropped.
    pub(super) fn add(&mut self, (block, start): (usize, u64), window: Registration) {
        if self.is_over {
            return;
        }
        self.made += 1;
        self.bytes += window.memory().len() as u64;
        self.registered.entry((block, start)).or_default().push(window);
    }

    /// Removes the windows that begin at this byte. Dropping them deregisters the memory.
    #[must_use]
    pub(super) fn take(&mut self, block: usize, start: u64) -> Vec<Registration> {
        let taken = self.registered.remove(&(block, start)).unwrap_or_default();
        self.bytes -= taken.iter().map(|window| window.memory().len() as u64).sum::<u64>();
        taken
    }

    /// Removes all windows, and stores none from now on.
    #[must_use]
    pub(super) fn end(&mut self) -> Vec<Registration> {
        self.is_over = true;
        self.bytes = 0;
        let windows = std::mem::take(&mut self.registered).into_values().flatten();
        windows.chain(std::mem::take(&mut self.on_demand).into_values()).collect()
    }

    /// Bytes that are pinned now. Bytes under two windows count twice, as they do for the locked-memory limit.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of windows that were registered so far.
    pub(super) fn made(&self) -> u64 {
        self.made
    }
}

/// The offset in the block of the first byte after a window.
fn end(window: &Registration) -> u64 {
    let offset = window.memory().block().map_or(0, |(_, offset)| offset);
    offset + window.memory().len() as u64
}
