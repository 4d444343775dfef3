//! The blocks in memory, and those that a thread is fetching.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

/// A block of a version of an object: the object's digest, and the block's number.
pub(super) type BlockKey = ([u8; 32], u64);

/// Blocks in memory.
pub(super) struct Memory {
    limit: usize,
    state: Mutex<State>,
    change: Condvar,
}

#[derive(Default)]
struct State {
    blocks: HashMap<BlockKey, Block>,
    bytes: usize,
    clock: u64,
}

enum Block {
    /// A thread is fetching it.
    Coming,
    Here {
        content: Arc<Vec<u8>>,
        used: u64,
    },
}

/// What [`Memory::take`] found.
pub(super) enum Found<'a> {
    Here(Arc<Vec<u8>>),
    /// The caller must fetch it.
    Absent(Claim<'a>),
}

/// Blocks that the holder fetches. Dropping it lets another thread try.
pub(super) struct Claim<'a> {
    memory: &'a Memory,
    keys: Vec<BlockKey>,
}

impl Memory {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, state: Mutex::default(), change: Condvar::new() }
    }

    /// The block, or the claim to fetch it. Waits for another thread that is fetching it.
    pub(super) fn take(&self, key: BlockKey) -> Found<'_> {
        let mut state = self.state.lock();
        loop {
            state.clock += 1;
            let clock = state.clock;
            match state.blocks.get_mut(&key) {
                Some(Block::Here { content, used }) => {
                    *used = clock;
                    return Found::Here(Arc::clone(content));
                }
                Some(Block::Coming) => self.change.wait(&mut state),
                None => {
                    state.blocks.insert(key, Block::Coming);
                    return Found::Absent(Claim { memory: self, keys: vec![key] });
                }
            }
        }
    }
}

impl Claim<'_> {
    /// Claims the next block of the same object, if it is not there and no thread is fetching it.
    pub(super) fn extend(&mut self) -> bool {
        let Some((object, last)) = self.keys.last().copied() else { return false };
        let mut state = self.memory.state.lock();
        let key = (object, last + 1);
        let is_free = !state.blocks.contains_key(&key);
        if is_free {
            state.blocks.insert(key, Block::Coming);
            self.keys.push(key);
        }
        is_free
    }

    /// Number of claimed blocks.
    pub(super) fn count(&self) -> usize {
        self.keys.len()
    }

    /// Gives the blocks, in their order, to the threads that wait.
    pub(super) fn fulfil(mut self, contents: Vec<Arc<Vec<u8>>>) {
        let mut state = self.memory.state.lock();
        for (key, content) in self.keys.drain(..contents.len()).zip(contents) {
            state.clock += 1;
            state.bytes += content.len();
            let used = state.clock;
            state.blocks.insert(key, Block::Here { content, used });
        }
        state.make_room(self.memory.limit);
        drop(state);
        self.memory.change.notify_all();
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if self.keys.is_empty() {
            return;
        }
        let mut state = self.memory.state.lock();
        self.keys.iter().for_each(|key| drop(state.blocks.remove(key)));
        drop(state);
        self.memory.change.notify_all();
    }
}

impl State {
    /// Drops the blocks that were not used for the longest time.
    fn make_room(&mut self, limit: usize) {
        while self.bytes > limit {
            let used = |block: &Block| match block {
                Block::Coming => None,
                Block::Here { used, .. } => Some(*used),
            };
            let oldest = self.blocks.iter().filter_map(|(key, block)| Some((used(block)?, *key))).min();
            let Some((_, key)) = oldest else { return };
            if let Some(Block::Here { content, .. }) = self.blocks.remove(&key) {
                self.bytes -= content.len();
            }
        }
    }
}
