//! Buffers the chunks of one device stream until they are loaded.
//!
//! Chunks are put in order here. The buffered bytes have a limit.
//! A Sterna source gets a grant before it sends, so a lane never waits here.
//! Any other source sends without grants. A chunk without a gap before it waits for room, which the device's
//! loading frees. A chunk after a gap is refused if it exceeds the limit. Room is kept for the chunk that fills
//! the gap.

use std::collections::BTreeMap;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use sterna_wire::multifd::{DeviceChunk, DeviceChunkKind};

use crate::error::{BadChunk, MigrationError, Misbehaviour};
use crate::stats::StreamStatistics;
use crate::streams::{CONFIGURATION_BYTES, MOST_CHUNK_BYTES, Streamed};

/// Largest payload of a chunk, in bytes, if the source has a total credit of `limit` (specs/extension.md §8).
fn largest_chunk(limit: u64) -> u64 {
    (limit / 4).max(LEAST_LIMIT)
}

/// Most chunks that are buffered, whatever their size.
const HELD_CHUNKS: usize = 65_536;
/// Largest chunk from a source without credit, in bytes. Each lane may buffer one before it is known whether
/// there is room. QEMU's chunks have 1 MiB.
const UNASKED_BYTES: u64 = 16 << 20;
/// Smallest limit: room for a configuration with its header.
const LEAST_LIMIT: u64 = (CONFIGURATION_BYTES + DeviceChunk::MAX_BYTES) as u64;
/// The largest usual chunk, with its header.
const WHOLE_CHUNK_BYTES: u64 = (MOST_CHUNK_BYTES + DeviceChunk::MAX_BYTES) as u64;
/// Below this size, the capacity of a reused buffer does not matter.
const SMALL_BYTES: u64 = 64 << 10;
/// Most buffers that are kept for reuse, with at most a quarter of the limit in total. New memory costs as much
/// as a copy.
const SPARE_BUFFERS: usize = 32;

pub(in crate::incoming) struct Inbox {
    pub device: Streamed,
    /// Most bytes of payloads that are buffered.
    limit: u64,
    state: Mutex<InboxState>,
    changed: Condvar,
}

#[derive(Default)]
struct InboxState {
    /// Whether the source observes grants.
    has_credit: bool,
    /// Index of the chunk that is loaded next.
    next: u32,
    held: BTreeMap<u32, Chunk>,
    /// Chunks that wait for room, each in the lane that received it.
    waiting: Vec<u32>,
    /// Bytes of payloads. `held_bytes`: buffered or being loaded; the others: loaded, received and granted in
    /// total.
    held_bytes: u64,
    loaded_bytes: u64,
    come_bytes: u64,
    granted_bytes: u64,
    chunks: u64,
    /// Index of the configuration, which is the last chunk.
    last: Option<u32>,
    /// Bytes of the stream that were loaded so far.
    data_bytes: u64,
    initial_is_loaded: bool,
    /// The device is loading a chunk.
    is_loading: bool,
    is_loaded: bool,
    is_stopped: bool,
    /// The device was told to begin loading.
    is_begun: bool,
    /// The stream restarts from its beginning, as soon as the load thread has discarded the loaded part.
    begins_anew: bool,
    began: Option<Instant>,
    statistics: StreamStatistics,
    spare: Vec<Vec<u8>>,
}

/// The next task of a load thread.
pub(super) enum Next {
    Chunk(Chunk),
    /// Discard the loaded part, and confirm with [`Inbox::has_forgotten`].
    BeginsAnew,
}

/// A chunk as it was received.
pub(super) struct Chunk {
    pub kind: DeviceChunkKind,
    payload: Vec<u8>,
    /// Offset in `payload` of the first data byte.
    data_at: usize,
}

impl InboxState {
    /// Whether every chunk before `index` has arrived.
    fn is_in_line(&self, index: u32) -> bool {
        let highest = self.held.keys().next_back();
        index == self.next
            || (self.chunks == u64::from(index) && highest.is_none_or(|highest| *highest < index))
    }

    /// As [`InboxState::is_in_line`], counting chunks in lanes that wait for room.
    fn follows_waiting(&self, index: u32) -> bool {
        let before = self.waiting.iter().filter(|waiting| **waiting < index).count() as u64;
        let highest = self.held.keys().next_back();
        self.chunks + before == u64::from(index) && highest.is_none_or(|highest| *highest < index)
    }

    /// Whether a chunk of `bytes` must wait for room.
    fn lacks_room(&self, index: u32, bytes: u64, limit: u64) -> bool {
        // The device waits for exactly this chunk.
        let is_wanted = index == self.next && !self.is_loading;
        let kept_free = if self.is_in_line(index) { 0 } else { bytes };
        !is_wanted && self.held_bytes > 0 && self.held_bytes + bytes + kept_free > limit
    }
}

impl Chunk {
    pub(super) fn data(&self) -> &[u8] {
        &self.payload[self.data_at..]
    }
}

impl Inbox {
    pub(crate) fn new(device: Streamed, limit: u64) -> Self {
        let statistics = StreamStatistics::of(&device.name, device.instance);
        let limit = limit.max(LEAST_LIMIT);
        Self {
            device,
            limit,
            state: Mutex::new(InboxState { statistics, ..InboxState::default() }),
            changed: Condvar::new(),
        }
    }

    /// Starts credit: the source observes grants from now on. Returns the first grant in bytes.
    pub(crate) fn begin_credit(&self) -> u64 {
        let mut state = self.state.lock();
        state.has_credit = true;
        state.granted_bytes = state.loaded_bytes + self.limit;
        state.granted_bytes
    }

    /// A buffer for a payload of `bytes` that is about to be read.
    ///
    /// # Errors
    /// The source sends more than it is allowed to.
    pub(crate) fn buffer(&self, bytes: u32) -> Result<Vec<u8>, MigrationError> {
        let bytes = u64::from(bytes);
        let mut state = self.state.lock();
        // A source that knows no limit cannot keep its chunks below it: one such chunk is buffered alone.
        let most = if state.has_credit { self.limit } else { self.limit.max(WHOLE_CHUNK_BYTES) };
        if bytes > most {
            return Err(self.misbehaved(BadChunk::TooLarge { bytes, most }));
        }
        let come = state.come_bytes.saturating_add(bytes);
        if state.has_credit && come > state.granted_bytes {
            return Err(self.misbehaved(BadChunk::BeyondGrant { came: come, granted: state.granted_bytes }));
        }
        if !state.has_credit && bytes > UNASKED_BYTES {
            return Err(self.misbehaved(BadChunk::TooLargeWithoutGrant { bytes, most: UNASKED_BYTES }));
        }
        state.come_bytes = come;
        // The limit counts used bytes, so a large buffer is not used for few bytes.
        let fits = |spare: &Vec<u8>| spare.capacity() as u64 <= 2 * bytes.max(SMALL_BYTES);
        let mut buffer = state.spare.pop().filter(fits).unwrap_or_default();
        drop(state);
        buffer.resize(bytes as usize, 0);
        Ok(buffer)
    }

    /// Stores a payload that was read into a buffer of [`Inbox::buffer`].
    ///
    /// # Errors
    /// The payload is no chunk, is a repetition, does not fit into the stream, or exceeds the limit.
    pub(crate) fn put(&self, payload: Vec<u8>) -> Result<(), MigrationError> {
        let (DeviceChunk { index, kind }, data_at) = DeviceChunk::decode(&payload)
            .map_err(|error| MigrationError::wire(&self.device.to_string())(error))?;
        let bytes = payload.len() as u64;
        let mut state = self.state.lock();
        if state.waiting.contains(&index) {
            return Err(self.misbehaved(BadChunk::Twice { index }));
        }
        self.check(&state, index, kind, payload.len() - data_at)?;
        while !state.has_credit && state.lacks_room(index, bytes, self.limit) {
            if state.is_stopped {
                return Err(MigrationError::Cancelled);
            }
            if !state.is_in_line(index) && !state.follows_waiting(index) {
                return Err(self.misbehaved(BadChunk::NoRoom {
                    index,
                    held: state.held_bytes,
                    next: state.next,
                    most: self.limit,
                }));
            }
            state.waiting.push(index);
            self.changed.wait(&mut state);
            state.waiting.retain(|waiting| *waiting != index);
            // Another lane may have received the end meanwhile.
            self.check(&state, index, kind, payload.len() - data_at)?;
        }
        if matches!(kind, DeviceChunkKind::Configuration { .. }) {
            state.last = Some(index);
        }
        state.began.get_or_insert_with(Instant::now);
        state.held_bytes += bytes;
        state.chunks += 1;
        let peak = state.statistics.peak_bytes.max(state.held_bytes);
        state.statistics.peak_bytes = peak;
        state.held.insert(index, Chunk { kind, payload, data_at });
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Records that the device is told to begin loading. False: it was told before, and the stream continues.
    pub(super) fn begin(&self) -> bool {
        !std::mem::replace(&mut self.state.lock().is_begun, true)
    }

    /// Whether the device has loaded data that it would have to discard.
    pub(super) fn has_loaded(&self) -> bool {
        self.state.lock().loaded_bytes > 0
    }

    /// Waits for the next chunk in order. `None`: loading stops. [`Inbox::loaded`] frees the chunk's room.
    pub(super) fn take(&self) -> Option<Next> {
        let mut state = self.state.lock();
        loop {
            if state.is_stopped {
                return None;
            }
            if state.begins_anew {
                return Some(Next::BeginsAnew);
            }
            let next = state.next;
            if let Some(chunk) = state.held.remove(&next) {
                // The last chunk has the highest index, so none follows.
                state.next = next.saturating_add(1);
                state.is_loading = true;
                return Some(Next::Chunk(chunk));
            }
            let began = Instant::now();
            self.changed.wait(&mut state);
            if state.began.is_some() {
                state.statistics.waiting += began.elapsed();
            }
        }
    }

    /// Records that `chunk` was loaded. Returns the total to grant the source now, or `None` if it is not worth
    /// a message.
    pub(super) fn loaded(&self, chunk: Chunk, took: std::time::Duration) -> Option<u64> {
        let mut state = self.state.lock();
        let bytes = chunk.payload.len() as u64;
        state.is_loading = false;
        state.held_bytes -= bytes;
        state.loaded_bytes += bytes;
        match chunk.kind {
            DeviceChunkKind::Data { initial_ends } => {
                state.data_bytes += chunk.data().len() as u64;
                state.initial_is_loaded |= initial_ends;
                state.statistics.working += took;
                state.statistics.bytes = state.data_bytes;
            }
            DeviceChunkKind::Configuration { .. } => {
                state.is_loaded = true;
                state.statistics.configuration = took;
                state.statistics.took = state.began.map(|began| began.elapsed()).unwrap_or_default();
            }
        }
        let spare = (state.spare.len() as u64 + 1).saturating_mul(chunk.payload.capacity() as u64);
        if state.spare.len() < SPARE_BUFFERS && spare <= (self.limit / 4).max(bytes) {
            state.spare.push(chunk.payload);
        }
        let due = state.loaded_bytes + self.limit;
        // One message per quarter of the limit, but early enough for the largest chunk.
        let room = state.granted_bytes.saturating_sub(state.come_bytes);
        let is_worth = due.saturating_sub(state.granted_bytes) >= self.limit / 4
            || (state.held_bytes == 0 && room < largest_chunk(self.limit));
        let grant =
            (state.has_credit && is_worth && !state.is_loaded && due > state.granted_bytes).then_some(due);
        if let Some(grant) = grant {
            state.granted_bytes = grant;
        }
        drop(state);
        self.changed.notify_all();
        grant
    }

    /// Checks the announced length of the stream against the received length.
    pub(super) fn check_total(&self, total_bytes: Option<u64>) -> Result<(), MigrationError> {
        let came = self.state.lock().data_bytes;
        match total_bytes {
            Some(total) if total != came => Err(self.misbehaved(BadChunk::Total { came, announced: total })),
            _ => Ok(()),
        }
    }

    /// Checks that all chunks have arrived.
    ///
    /// # Errors
    /// Names the first missing chunk.
    pub(crate) fn all_came(&self) -> Result<(), MigrationError> {
        let state = self.state.lock();
        if state.last.is_some_and(|last| state.chunks == u64::from(last) + 1) {
            return Ok(());
        }
        let missing = (state.next..).find(|index| !state.held.contains_key(index)).unwrap_or(u32::MAX);
        let why = match (state.chunks, state.last) {
            (0, _) => BadChunk::NoneCame,
            (_, Some(last)) => BadChunk::Missing { index: missing, count: u64::from(last) + 1 },
            (count, None) => BadChunk::NoEnd { count },
        };
        Err(self.misbehaved(why))
    }

    /// Whether the stream is loaded to its end.
    pub(crate) fn is_loaded(&self) -> bool {
        self.state.lock().is_loaded
    }

    /// Whether the switchover need not wait for this stream: its initial bytes are loaded, or it has none.
    pub(crate) fn is_ready_for_switchover(&self) -> bool {
        let state = self.state.lock();
        !state.has_credit || state.initial_is_loaded
    }

    /// Bytes that were received and bytes that were loaded.
    pub(crate) fn progress(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.come_bytes, state.loaded_bytes)
    }

    pub(crate) fn statistics(&self) -> StreamStatistics {
        self.state.lock().statistics.clone()
    }

    /// Resets the inbox for a stream that restarts, after the device has discarded the loaded part. No load
    /// thread may run.
    pub(crate) fn restart(&self) {
        *self.state.lock() = self.empty();
    }

    /// Prepares for a lost connection: the stream continues after the loaded part. No load thread may run.
    pub(crate) fn suspend(&self) {
        let mut state = self.state.lock();
        let loaded = state.loaded_bytes;
        state.held.clear();
        state.waiting.clear();
        (state.held_bytes, state.come_bytes, state.granted_bytes) = (0, loaded, 0);
        state.chunks = u64::from(state.next);
        if !state.is_loaded {
            state.last = None;
        }
        (state.has_credit, state.is_stopped, state.begins_anew) = (false, false, false);
    }

    /// Restarts the stream from its beginning. Waits until the load thread has discarded the loaded part.
    /// False: loading stops.
    pub(crate) fn begin_anew(&self) -> bool {
        let mut state = self.state.lock();
        state.begins_anew = true;
        self.changed.notify_all();
        while state.begins_anew && !state.is_stopped {
            self.changed.wait(&mut state);
        }
        !state.is_stopped
    }

    /// Confirms that the device has discarded the loaded part and begins to load again.
    pub(super) fn has_forgotten(&self) {
        let mut state = self.state.lock();
        *state = InboxState { is_begun: true, is_stopped: state.is_stopped, ..self.empty() };
        drop(state);
        self.changed.notify_all();
    }

    fn empty(&self) -> InboxState {
        let statistics = StreamStatistics::of(&self.device.name, self.device.instance);
        InboxState { statistics, ..InboxState::default() }
    }

    /// Wakes all waiting threads, and ends every later wait.
    pub(crate) fn stop(&self) {
        self.state.lock().is_stopped = true;
        self.changed.notify_all();
    }

    fn check(
        &self,
        state: &InboxState,
        index: u32,
        kind: DeviceChunkKind,
        data_bytes: usize,
    ) -> Result<(), MigrationError> {
        let is_last = matches!(kind, DeviceChunkKind::Configuration { .. });
        if state.last.is_some_and(|last| is_last || index > last) {
            return Err(self.misbehaved(BadChunk::AfterEnd { index }));
        }
        if index < state.next || state.held.contains_key(&index) {
            return Err(self.misbehaved(BadChunk::Twice { index }));
        }
        if is_last && state.held.keys().next_back().is_some_and(|highest| *highest > index) {
            return Err(self.misbehaved(BadChunk::EarlyEnd { index }));
        }
        if state.held.len() >= HELD_CHUNKS {
            return Err(self.misbehaved(BadChunk::TooManyWait { most: HELD_CHUNKS, next: state.next }));
        }
        if is_last && data_bytes > CONFIGURATION_BYTES {
            let why = BadChunk::Configuration { bytes: data_bytes, most: CONFIGURATION_BYTES };
            return Err(self.misbehaved(why));
        }
        Ok(())
    }

    fn misbehaved(&self, why: BadChunk) -> MigrationError {
        let (device, instance) = (self.device.name.clone(), self.device.instance);
        Misbehaviour::Chunk { device, instance, why }.into()
    }
}

#[cfg(test)]
mod tests;
