//! Chunks of an image in memory: read once for all that want them, ahead of time where that is known, and bounded.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use sterna_ram::{Backing, PAGE_SIZE, RamBlock, RamSlice};

use super::order::CHUNK_PAGES;
use super::store::ImageStore;
use crate::error::MigrationError;
use crate::order::PageRun;

const CHUNK_BYTES: usize = CHUNK_PAGES as usize * PAGE_SIZE;
/// Least that a cache takes: a chunk for each of its readers, and two to copy from.
pub(crate) const LEAST_BYTES: u64 = 4 * CHUNK_BYTES as u64;

/// Block and number of a chunk.
pub(crate) type Key = (usize, u64);

/// The chunks of one image that were read last.
pub(crate) struct ChunkCache {
    store: Arc<ImageStore>,
    memory: RamBlock,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    chunks: HashMap<Key, Chunk>,
    /// Chunks that nobody copies from, by when they were used last.
    idle: BTreeMap<u64, Key>,
    /// Slots of the memory that no chunk has.
    free: Vec<u64>,
    /// To be read ahead, soonest first.
    wanted: VecDeque<Key>,
    clock: u64,
    is_closed: bool,
}

struct Chunk {
    slot: u64,
    is_read: bool,
    /// Threads that copy from it; it stays meanwhile.
    users: u32,
    used_at: u64,
}

impl ChunkCache {
    /// A cache over `store` that takes at most `limit_bytes` of memory, and at least [`LEAST_BYTES`].
    pub(crate) fn new(store: Arc<ImageStore>, limit_bytes: u64) -> Result<Self, MigrationError> {
        let slots = limit_bytes.max(LEAST_BYTES) / CHUNK_BYTES as u64;
        let memory = RamBlock::new("read-ahead", slots * CHUNK_BYTES as u64, Backing::Anonymous)?;
        let state = State { free: (0..slots).rev().collect(), ..State::default() };
        Ok(Self { store, memory, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// The image.
    pub(crate) fn store(&self) -> &ImageStore {
        &self.store
    }

    /// Chunks that fit.
    pub(crate) fn slots(&self) -> usize {
        (self.memory.len_bytes() / CHUNK_BYTES as u64) as usize
    }

    /// Gives `act` the content of chunk `key`, which is read if it is not here. Pages that the image does not hold are
    /// anything.
    pub(crate) fn with<T>(
        &self,
        key: Key,
        act: impl FnOnce(RamSlice<'_>) -> Result<T, MigrationError>,
    ) -> Result<T, MigrationError> {
        let slot = self.hold(key)?;
        let result = self.slice(slot).and_then(act);
        self.release(key);
        result
    }

    /// As [`with`](Self::with), if the chunk is here already.
    pub(crate) fn with_present<T>(
        &self,
        key: Key,
        act: impl FnOnce(RamSlice<'_>) -> Result<T, MigrationError>,
    ) -> Option<Result<T, MigrationError>> {
        let slot = {
            let mut state = self.state.lock();
            state.chunks.get(&key).filter(|chunk| chunk.is_read)?;
            state.hold(key)?
        };
        let result = self.slice(slot).and_then(act);
        self.release(key);
        Some(result)
    }

    /// The chunks `keys` will be wanted soon. Those for which there is no room are left out.
    pub(crate) fn read_ahead(&self, keys: impl IntoIterator<Item = Key>) {
        let mut state = self.state.lock();
        for key in keys {
            if state.wanted.len() < self.slots()
                && !state.chunks.contains_key(&key)
                && !state.wanted.contains(&key)
            {
                state.wanted.push_back(key);
            }
        }
        self.changed.notify_all();
    }

    /// Reads ahead what is wanted, until the cache is closed. For threads of their own.
    pub(crate) fn work(&self) {
        while let Some(key) = self.next_wanted() {
            // Whoever needs the chunk reads it again and meets the error where it can be told.
            if let Err(error) = self.with(key, |_| Ok(())) {
                tracing::warn!("reading ahead: {error}");
            }
        }
    }

    /// Ends [`work`](Self::work).
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn next_wanted(&self) -> Option<Key> {
        let mut state = self.state.lock();
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(key) = state.wanted.pop_front() {
                return Some(key);
            }
            self.changed.wait(&mut state);
        }
    }

    /// The slot of a chunk that is read and stays until it is released.
    fn hold(&self, key: Key) -> Result<u64, MigrationError> {
        let mut state = self.state.lock();
        let slot = loop {
            if let Some(chunk) = state.chunks.get(&key) {
                if chunk.is_read
                    && let Some(slot) = state.hold(key)
                {
                    return Ok(slot);
                }
                // Another thread reads it.
                self.changed.wait(&mut state);
                continue;
            }
            match state.take_slot() {
                Some(slot) => break slot,
                // All are being read or copied from, which takes no longer than the disk.
                None => self.changed.wait(&mut state),
            }
        };
        state.chunks.insert(key, Chunk { slot, is_read: false, users: 1, used_at: 0 });
        drop(state);
        let read = self.read(key, slot);
        let mut state = self.state.lock();
        match &read {
            Ok(()) => {
                if let Some(chunk) = state.chunks.get_mut(&key) {
                    chunk.is_read = true;
                }
            }
            Err(_) => {
                state.chunks.remove(&key);
                state.free.push(slot);
            }
        }
        self.changed.notify_all();
        read.map(|()| slot)
    }

    fn read(&self, key: Key, slot: u64) -> Result<(), MigrationError> {
        let first = key.1 * CHUNK_PAGES;
        let count = CHUNK_PAGES.min(self.store.held(key.0).pages() - first);
        self.store.read(PageRun { block: key.0, first, count }, self.slice(slot)?)
    }

    fn release(&self, key: Key) {
        let mut state = self.state.lock();
        state.release(key);
        self.changed.notify_all();
    }

    fn slice(&self, slot: u64) -> Result<RamSlice<'_>, MigrationError> {
        Ok(self.memory.slice(slot * CHUNK_BYTES as u64, CHUNK_BYTES)?)
    }
}

impl State {
    fn hold(&mut self, key: Key) -> Option<u64> {
        let chunk = self.chunks.get_mut(&key)?;
        if chunk.users == 0 {
            self.idle.remove(&chunk.used_at);
        }
        chunk.users += 1;
        Some(chunk.slot)
    }

    fn release(&mut self, key: Key) {
        self.clock += 1;
        let Some(chunk) = self.chunks.get_mut(&key) else { return };
        chunk.users -= 1;
        if chunk.users == 0 {
            chunk.used_at = self.clock;
            self.idle.insert(self.clock, key);
        }
    }

    /// A free slot, or that of the chunk which nobody has used for the longest time.
    fn take_slot(&mut self) -> Option<u64> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        let (_, oldest) = self.idle.pop_first()?;
        self.chunks.remove(&oldest).map(|chunk| chunk.slot)
    }
}
