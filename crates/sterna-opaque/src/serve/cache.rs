//! A bounded cache of an image's chunks. All destinations share it, and threads read ahead into it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use sterna::error::MigrationError;
use sterna::internals::PageRun;
use sterna::internals::postcopy::CHUNK_PAGES;
use sterna_ram::{Backing, PAGE_SIZE, RamBlock, RamSlice};

use super::store::ImageStore;

const CHUNK_BYTES: usize = CHUNK_PAGES as usize * PAGE_SIZE;
/// Smallest size in bytes: one chunk for each of the two readers, and two to copy from.
pub(crate) const LEAST_BYTES: u64 = 4 * CHUNK_BYTES as u64;

/// Block index and chunk number.
pub(crate) type Key = (usize, u64);

/// The most recently used chunks of one image.
pub(crate) struct ChunkCache {
    store: Arc<ImageStore>,
    memory: RamBlock,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    chunks: HashMap<Key, Chunk>,
    /// Chunks that no thread copies from, by the time of their last use.
    idle: BTreeMap<u64, Key>,
    /// Slots of the memory that are not assigned to a chunk.
    free: Vec<u64>,
    /// Chunks to read ahead, most urgent first.
    wanted: VecDeque<Key>,
    clock: u64,
    is_closed: bool,
}

struct Chunk {
    slot: u64,
    is_read: bool,
    /// Number of threads that copy from the chunk. It stays in its slot meanwhile.
    users: u32,
    used_at: u64,
}

impl ChunkCache {
    /// Creates a cache over `store` that uses at most `limit_bytes` of memory, but at least [`LEAST_BYTES`].
    pub(crate) fn new(store: Arc<ImageStore>, limit_bytes: u64) -> Result<Self, MigrationError> {
        let slots = limit_bytes.max(LEAST_BYTES) / CHUNK_BYTES as u64;
        let memory = RamBlock::new("read-ahead", slots * CHUNK_BYTES as u64, Backing::Anonymous)?;
        let state = State { free: (0..slots).rev().collect(), ..State::default() };
        Ok(Self { store, memory, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// The image whose chunks are cached.
    pub(crate) fn store(&self) -> &ImageStore {
        &self.store
    }

    /// Number of chunks that fit into the cache.
    pub(crate) fn slots(&self) -> usize {
        (self.memory.len_bytes() / CHUNK_BYTES as u64) as usize
    }

    /// Gives `act` the content of chunk `key`, and reads the chunk first if necessary. Pages that the image
    /// does not contain have undefined content.
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

    /// As [`with`](Self::with), but only if the chunk is already in the cache.
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

    /// Queues the chunks `keys` to be read ahead. Chunks beyond the room of the queue are ignored.
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

    /// The body of a reader thread: reads queued chunks until the cache is closed.
    pub(crate) fn work(&self) {
        while let Some(key) = self.next_wanted() {
            // Only logged: the thread that needs the chunk reads it again, and can report the error.
            if let Err(error) = self.with(key, |_| Ok(())) {
                tracing::warn!("reading ahead: {error}");
            }
        }
    }

    /// Ends all threads in [`work`](Self::work).
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

    /// Reads a chunk if necessary, and pins it until it is released. Returns its slot.
    fn hold(&self, key: Key) -> Result<u64, MigrationError> {
        let mut state = self.state.lock();
        let slot = loop {
            if let Some(chunk) = state.chunks.get(&key) {
                if chunk.is_read
                    && let Some(slot) = state.hold(key)
                {
                    return Ok(slot);
                }
                // Another thread is reading this chunk.
                self.changed.wait(&mut state);
                continue;
            }
            match state.take_slot() {
                Some(slot) => break slot,
                // All chunks are being read or copied. The wait is short, because it takes one disk access at
                // most.
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

    /// Returns a free slot, or the slot of the least recently used idle chunk.
    fn take_slot(&mut self) -> Option<u64> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        let (_, oldest) = self.idle.pop_first()?;
        self.chunks.remove(&oldest).map(|chunk| chunk.slot)
    }
}
