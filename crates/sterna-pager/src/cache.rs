//! Frames of the image in bounded memory. A frame that several threads need at once is read once.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::source::SourceError;

/// The most recently used frames of one source.
pub(crate) struct FrameCache {
    limit: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    frames: HashMap<u64, Entry>,
    /// Frames by the time of their last use.
    by_use: BTreeMap<u64, u64>,
    bytes: usize,
    clock: u64,
}

enum Entry {
    /// A thread reads the frame.
    Reading,
    Read {
        content: Arc<[u8]>,
        used_at: u64,
    },
}

impl FrameCache {
    pub(crate) fn new(limit_bytes: u64) -> Self {
        let limit = usize::try_from(limit_bytes).unwrap_or(usize::MAX);
        Self { limit, state: Mutex::default(), changed: Condvar::new() }
    }

    /// The frame `key`, if it is in memory.
    pub(crate) fn peek(&self, key: u64) -> Option<Arc<[u8]>> {
        self.state.lock().touch(key)
    }

    /// The frame `key` of `bytes` bytes. Exactly one of several threads reads it with `read`; the others wait.
    ///
    /// A thread whose own read fails gets the error. A thread that waited for it reads by itself.
    pub(crate) fn get(
        &self,
        key: u64,
        bytes: usize,
        read: impl FnOnce(&mut [u8]) -> Result<(), SourceError>,
    ) -> Result<Arc<[u8]>, SourceError> {
        let mut state = self.state.lock();
        loop {
            if let Some(content) = state.touch(key) {
                return Ok(content);
            }
            if !state.frames.contains_key(&key) {
                break;
            }
            self.changed.wait(&mut state);
        }
        state.frames.insert(key, Entry::Reading);
        state.make_room(bytes, self.limit);
        state.bytes += bytes;
        drop(state);
        let mut reading = Reading { cache: self, key, bytes, content: None };
        let mut content = vec![0; bytes];
        read(&mut content)?;
        let content: Arc<[u8]> = content.into();
        reading.content = Some(Arc::clone(&content));
        Ok(content)
    }
}

/// Ends a read, also if it fails or panics: other threads wait for it.
struct Reading<'a> {
    cache: &'a FrameCache,
    key: u64,
    bytes: usize,
    content: Option<Arc<[u8]>>,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        let mut state = self.cache.state.lock();
        match self.content.take() {
            Some(content) => {
                state.clock += 1;
                let used_at = state.clock;
                state.by_use.insert(used_at, self.key);
                state.frames.insert(self.key, Entry::Read { content, used_at });
            }
            None => {
                state.frames.remove(&self.key);
                state.bytes -= self.bytes;
            }
        }
        self.cache.changed.notify_all();
    }
}

impl State {
    fn touch(&mut self, key: u64) -> Option<Arc<[u8]>> {
        let clock = self.clock + 1;
        let Some(Entry::Read { content, used_at }) = self.frames.get_mut(&key) else { return None };
        self.clock = clock;
        self.by_use.remove(used_at);
        *used_at = clock;
        self.by_use.insert(clock, key);
        Some(Arc::clone(content))
    }

    /// Removes the frames that were not used for the longest time, until `bytes` more fit.
    fn make_room(&mut self, bytes: usize, limit: usize) {
        while self.bytes + bytes > limit {
            let Some((_, key)) = self.by_use.pop_first() else { return };
            if let Some(Entry::Read { content, .. }) = self.frames.remove(&key) {
                self.bytes -= content.len();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn short() -> SourceError {
        SourceError::Short { name: "image".into(), offset: 0 }
    }

    #[test]
    fn frame_that_threads_need_at_once_is_read_once() {
        let (cache, reads, start) = (FrameCache::new(1 << 20), AtomicUsize::new(0), Barrier::new(8));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    start.wait();
                    let frame = cache.get(3, 4096, |to| {
                        reads.fetch_add(1, Ordering::Relaxed);
                        to.fill(9);
                        Ok(())
                    });
                    assert_eq!(frame.unwrap()[4095], 9);
                });
            }
        });

        assert_eq!(reads.into_inner(), 1);
    }

    #[test]
    fn least_recently_used_frame_makes_room() {
        let cache = FrameCache::new(3 * 4096);
        for key in [1, 2, 3, 1, 4] {
            let _ = cache.get(key, 4096, |_| Ok(())).unwrap();
        }

        assert!(cache.peek(2).is_none());
        assert!([1, 3, 4].iter().all(|key| cache.peek(*key).is_some()));
        assert_eq!(cache.state.lock().bytes, 3 * 4096);
    }

    #[test]
    fn failed_read_is_repeated_by_the_next_thread() {
        let cache = FrameCache::new(1 << 20);

        assert!(cache.get(1, 4096, |_| Err(short())).is_err());
        assert!(cache.get(1, 4096, |_| Ok(())).is_ok());
        assert_eq!(cache.state.lock().bytes, 4096);
    }
}
