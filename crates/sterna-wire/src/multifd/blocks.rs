//! The RAM blocks that a receiver knows.
//!
//! Packets and records name their block. The table turns each name into an index and a length.

use crate::PAGE_SIZE;
use crate::error::WireError;
use crate::limits;

const MESSAGE: &str = "table of RAM blocks";
const SPEC: &str = "specs/stream.md §2.2";

/// Names and lengths of a guest's RAM blocks. The index is the position in the original list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockTable {
    blocks: Vec<(String, u64)>,
    by_name: Vec<usize>,
}

impl BlockTable {
    /// Builds a table from pairs of name and length in bytes.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for a name that is empty, longer than 255 bytes, repeated, or
    /// contains NUL. Also for a length that is not a multiple of the page size.
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

    /// Number of blocks in the table.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether the table has no block.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Name of the block with this index.
    ///
    /// # Panics
    /// When `index` is [`len`](Self::len) or more.
    pub fn name(&self, index: usize) -> &str {
        &self.blocks[index].0
    }

    /// Length of the block with this index, in bytes.
    ///
    /// # Panics
    /// When `index` is [`len`](Self::len) or more.
    pub fn length_bytes(&self, index: usize) -> u64 {
        self.blocks[index].1
    }

    /// Pairs of name and length in bytes, in index order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, u64)> {
        self.blocks.iter().map(|(name, length)| (name.as_str(), *length))
    }

    /// Sum of all lengths, in bytes; `None` on overflow.
    pub fn total_bytes(&self) -> Option<u64> {
        self.blocks.iter().try_fold(0u64, |sum, block| sum.checked_add(block.1))
    }

    /// Index of the block with this name.
    pub fn find(&self, name: &[u8]) -> Option<usize> {
        let order = |index: &usize| self.blocks[*index].0.as_bytes().cmp(name);
        let place = self.by_name.binary_search_by(order).ok()?;
        Some(self.by_name[place])
    }
}
