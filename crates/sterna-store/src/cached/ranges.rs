//! Reads of remote objects through the cache.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use super::directory::Directory;
use super::memory::{BlockKey, Claim, Found, Memory};
use crate::blob::Blob;
use crate::error::StoreError;

/// Bytes of a block.
const BLOCK: u64 = 256 << 10;
/// Most blocks of one request, if blocks are read in their order.
const AHEAD: u64 = 16;
/// Most blocks of one request, if a reader asks for them.
const ASKED: u64 = 64;

/// Readers of an object that are told apart: a fill, and the faults between its reads.
const READERS: usize = 4;

/// The limits of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheOptions {
    /// Limit of the blocks in memory, in bytes (default 32 MiB).
    pub memory_bytes: usize,
    /// A directory for blocks, which processes share, and the limit of its files in bytes (default: none).
    ///
    /// Each process that writes may exceed the limit by a sixteenth of it.
    pub directory: Option<(PathBuf, u64)>,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self { memory_bytes: 32 << 20, directory: None }
    }
}

/// A cache for the objects of all storages of a process.
pub struct RangeCache {
    memory: Memory,
    directory: Option<Directory>,
}

impl RangeCache {
    /// Makes the cache's directory if it is missing.
    ///
    /// # Errors
    /// [`StoreError::Io`] if the directory cannot be made or used.
    pub fn new(options: &CacheOptions) -> Result<Self, StoreError> {
        let directory = options.directory.as_ref();
        let directory = directory.map(|(path, limit)| Directory::open(path, *limit)).transpose()?;
        Ok(Self { memory: Memory::new(options.memory_bytes), directory })
    }
}

/// A remote object that is read through the cache.
pub(super) struct CachedBlob {
    inner: Arc<dyn Blob>,
    cache: Arc<RangeCache>,
    /// Digest of the object's name, version and length.
    object: [u8; 32],
    /// Readers that go forward: the block after the last one that was fetched, and the blocks of that request. The newest is last.
    readers: Mutex<Vec<(u64, u64)>>,
}

impl CachedBlob {
    /// `version` must change with the content.
    pub(super) fn new(inner: Arc<dyn Blob>, version: &str, cache: Arc<RangeCache>) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("sterna range cache v1 2026");
        for text in [inner.name(), version] {
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        }
        hasher.update(&inner.len_bytes().to_le_bytes());
        let object = *hasher.finalize().as_bytes();
        Self { inner, cache, object, readers: Mutex::default() }
    }

    fn block_count(&self) -> u64 {
        self.inner.len_bytes().div_ceil(BLOCK)
    }

    /// The block `number` and those after it that came with it. The caller reads up to block `last`.
    fn blocks_from(&self, number: u64, last: u64) -> Result<Vec<Arc<Vec<u8>>>, StoreError> {
        let mut claim = match self.cache.memory.take((self.object, number)) {
            Found::Here(content) => return Ok(vec![content]),
            Found::Absent(claim) => claim,
        };
        let contents = match self.kept(number) {
            Some(content) => vec![Arc::new(content)],
            None => {
                self.extend(&mut claim, number, last);
                self.fetch(number, claim.count() as u64)?
            }
        };
        claim.fulfil(contents.clone());
        Ok(contents)
    }

    fn kept(&self, number: u64) -> Option<Vec<u8>> {
        let length = BLOCK.min(self.inner.len_bytes() - number * BLOCK) as usize;
        self.cache.directory.as_ref()?.get(&key(&(self.object, number)), length)
    }

    /// Claims the blocks that one request fetches together.
    fn extend(&self, claim: &mut Claim<'_>, number: u64, last: u64) {
        let run = {
            let mut readers = self.readers.lock();
            let known = readers.iter().position(|(next, _)| *next == number).map(|at| readers.remove(at));
            known.map_or(1, |(_, run)| (run * 2).min(AHEAD))
        };
        let wanted = run.max((last - number + 1).min(ASKED)).min(self.block_count() - number);
        while (claim.count() as u64) < wanted {
            let next = (self.object, number + claim.count() as u64);
            let is_kept = self.cache.directory.as_ref().is_some_and(|kept| kept.has(&key(&next)));
            if is_kept || !claim.extend() {
                break;
            }
        }
        let mut readers = self.readers.lock();
        if readers.len() == READERS {
            readers.remove(0);
        }
        readers.push((number + claim.count() as u64, claim.count() as u64));
    }

    fn fetch(&self, number: u64, count: u64) -> Result<Vec<Arc<Vec<u8>>>, StoreError> {
        let start = number * BLOCK;
        let length = (count * BLOCK).min(self.inner.len_bytes() - start);
        let mut bytes = vec![0; length as usize];
        self.inner.read_exact_at(start, &mut bytes)?;
        let contents: Vec<_> = bytes.chunks(BLOCK as usize).map(|part| Arc::new(part.to_vec())).collect();
        if let Some(directory) = &self.cache.directory {
            for (number, content) in (number..).zip(&contents) {
                directory.put(&key(&(self.object, number)), content);
            }
        }
        Ok(contents)
    }
}

fn key((object, number): &BlockKey) -> [u8; 32] {
    *blake3::Hasher::new().update(object).update(&number.to_le_bytes()).finalize().as_bytes()
}

impl Blob for CachedBlob {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_exact_at(&self, offset: u64, to: &mut [u8]) -> Result<(), StoreError> {
        if to.is_empty() {
            return Ok(());
        }
        let Some(end) = offset.checked_add(to.len() as u64).filter(|end| *end <= self.len_bytes()) else {
            return Err(StoreError::Torn { name: self.name().to_owned(), length_bytes: self.len_bytes() });
        };
        let (mut at, mut rest, last) = (offset, to, (end - 1) / BLOCK);
        while !rest.is_empty() {
            for block in self.blocks_from(at / BLOCK, last)? {
                if rest.is_empty() {
                    break;
                }
                let inside = (at % BLOCK) as usize;
                let count = rest.len().min(block.len() - inside);
                let (part, more) = rest.split_at_mut(count);
                part.copy_from_slice(&block[inside..inside + count]);
                at += count as u64;
                rest = more;
            }
        }
        Ok(())
    }

    fn name(&self) -> &str {
        self.inner.name()
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn version(&self) -> Option<&str> {
        self.inner.version()
    }
}
