//! The RAM blocks that a receiver knows, for looking up the names in packets.

use crate::PAGE_SIZE;
use crate::error::WireError;
use crate::limits;

const MESSAGE: &str = "table of RAM blocks";
const SPEC: &str = "specs/stream.md §2.2";

/// Names and lengths of the RAM blocks of a guest; the index is the position in the list it was made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockTable {
    blocks: Vec<(String, u64)>,
    by_name: Vec<usize>,
}

impl BlockTable {
    /// Makes a table of (name, length in bytes).
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) when a name is empty, too long, holds NUL or occurs twice, or when a
    /// length is not a multiple of the page size.
    pub fn new(blocks: impl IntoIterator<Item = (String, u64)>) -> Result<Self, WireError> {
        let blocks: Vec<(String, u64)> = blocks.into_iter().collect();
        for (name, length) in &blocks {
            if name.is_empty() || name.len() > limits::NAME_BYTES || name.contains('\0') {
                let rule = format!("block name {name:?} is not 1 to 255 bytes without NUL");
                return Err(WireError::local(MESSAGE, 0, SPEC, rule));
            }
            if length % PAGE_SIZE as u64 != 0 {
                let rule = format!("block {name:?} has {length} bytes, not a multiple of {PAGE_SIZE}");
                return Err(WireError::local(MESSAGE, 0, SPEC, rule));
            }
        }
        let mut by_name: Vec<usize> = (0..blocks.len()).collect();
        by_name.sort_by(|a, b| blocks[*a].0.cmp(&blocks[*b].0));
        if let Some(pair) = by_name.windows(2).find(|p| blocks[p[0]].0 == blocks[p[1]].0) {
            let rule = format!("block name {:?} occurs twice", blocks[pair[0]].0);
            return Err(WireError::local(MESSAGE, 0, SPEC, rule));
        }
        Ok(Self { blocks, by_name })
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether there is no block.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Name of block `index`.
    ///
    /// # Panics
    /// When there is no such block.
    pub fn name(&self, index: usize) -> &str {
        &self.blocks[index].0
    }

    /// Length of block `index` in bytes.
    ///
    /// # Panics
    /// When there is no such block.
    pub fn length_bytes(&self, index: usize) -> u64 {
        self.blocks[index].1
    }

    /// (name, length in bytes) of all blocks, in index order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, u64)> {
        self.blocks.iter().map(|(name, length)| (name.as_str(), *length))
    }

    /// Sum of all lengths, in bytes; `None` when it does not fit.
    pub fn total_bytes(&self) -> Option<u64> {
        self.blocks.iter().try_fold(0u64, |sum, block| sum.checked_add(block.1))
    }

    /// Index of the block of that name.
    pub fn find(&self, name: &[u8]) -> Option<usize> {
        let order = |index: &usize| self.blocks[*index].0.as_bytes().cmp(name);
        let place = self.by_name.binary_search_by(order).ok()?;
        Some(self.by_name[place])
    }
}
