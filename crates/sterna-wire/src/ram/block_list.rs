//! The list of RAM blocks at the start of the RAM section (`specs/stream.md §2.2`).

use super::flags;
use crate::PAGE_SIZE;
use crate::error::WireError;
use crate::limits::{BLOCKS, NAME_BYTES};
use crate::reader::{Reader, Stop};

const MESSAGE: &str = "RAM block list";
const SPEC: &str = "specs/stream.md §2.2";

/// Entry of one block in the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockEntry {
    /// Name of the block, 1 to 255 bytes without NUL.
    pub name: String,
    /// Length of the block in bytes, a multiple of the page size.
    pub length_bytes: u64,
    /// Guest physical address of the block; only with `x-ignore-shared`.
    pub address: Option<u64>,
}

impl BlockEntry {
    /// A block without an address.
    pub fn new(name: impl Into<String>, length_bytes: u64) -> Self {
        Self { name: name.into(), length_bytes, address: None }
    }

    /// Appends the entry as it is on the wire.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for a bad name or length.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        let name = self.name.as_bytes();
        if name.is_empty() || name.len() > NAME_BYTES || name.contains(&0) {
            let rule = format!("block name {:?} is not 1 to 255 bytes without NUL", self.name);
            return Err(WireError::local(MESSAGE, 0, SPEC, rule));
        }
        if !self.length_bytes.is_multiple_of(PAGE_SIZE as u64) {
            let rule = format!("block {:?} has {} bytes", self.name, self.length_bytes);
            return Err(WireError::local(MESSAGE, 0, SPEC, rule));
        }
        out.push(name.len() as u8);
        out.extend_from_slice(name);
        out.extend_from_slice(&self.length_bytes.to_be_bytes());
        if let Some(address) = self.address {
            out.extend_from_slice(&address.to_be_bytes());
        }
        Ok(())
    }

    /// Reads one entry. `left` is the sum of the lengths of this and all later entries.
    pub(crate) fn read(r: &mut Reader<'_>, left: u64, with_address: bool) -> Result<Self, Stop> {
        let name = r.name()?.to_owned();
        let length_bytes = r.u64()?;
        if !length_bytes.is_multiple_of(PAGE_SIZE as u64) {
            let rule = format!("block {name:?} has {length_bytes} bytes, not a multiple of {PAGE_SIZE}");
            return Err(r.bad(SPEC, rule));
        }
        if length_bytes > left {
            let rule =
                format!("block {name:?} has {length_bytes} bytes, but only {left} are left of the total");
            return Err(r.bad(SPEC, rule));
        }
        let address = if with_address { Some(r.u64()?) } else { None };
        Ok(Self { name, length_bytes, address })
    }
}

/// The list of all blocks of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockList {
    /// The entries, in the order on the wire.
    pub blocks: Vec<BlockEntry>,
}

impl BlockList {
    /// Sum of all lengths, in bytes; `None` on overflow.
    pub fn total_bytes(&self) -> Option<u64> {
        self.blocks.iter().try_fold(0u64, |sum, block| sum.checked_add(block.length_bytes))
    }

    /// Appends the record: total and entries, without the EOS.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for a bad name or length, or for too many blocks.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), WireError> {
        let Some(total) = self.total_bytes().filter(|_| self.blocks.len() <= BLOCKS) else {
            let rule = format!("{} blocks, at most {BLOCKS} of 2^64 bytes together", self.blocks.len());
            return Err(WireError::local(MESSAGE, 0, SPEC, rule));
        };
        out.extend_from_slice(&(total | flags::MEM_SIZE).to_be_bytes());
        self.blocks.iter().try_for_each(|block| block.encode(out))
    }
}
