//! Records without sections: what a preempt channel carries (`specs/postcopy.md §4`).

use super::flags;
use crate::error::WireError;
use crate::multifd::BlockTable;
use crate::reader::{self, Reader, Stop};

const MESSAGE: &str = "record on the preempt channel";
const SPEC: &str = "specs/postcopy.md §4";

/// One record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BareRecord {
    /// This page is all zero.
    Zero {
        /// Index in the block list.
        block: usize,
        /// Offset in the block in bytes: page-aligned and inside.
        offset: u64,
    },
    /// [`PAGE_SIZE`](crate::PAGE_SIZE) bytes of this page follow the record.
    Page {
        /// Index in the block list.
        block: usize,
        /// Offset in the block in bytes: page-aligned and inside.
        offset: u64,
    },
    /// The channel carries no more. Sources of machine types up to 7.2 say so before they close it.
    End,
}

/// Reads the records of one channel, and remembers the block of the last page.
#[derive(Debug, Clone, Default)]
pub struct BareRecordReader {
    last: Option<usize>,
}

impl BareRecordReader {
    /// Of a fresh channel.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads one from the start of `buf`, of a machine with these `blocks`; `None` until all of it is there.
    ///
    /// # Errors
    /// A word that is no page's, an unknown block, an offset beyond its block, a zero page of other bytes.
    pub fn decode(
        &mut self,
        blocks: &BlockTable,
        buf: &[u8],
    ) -> Result<Option<(BareRecord, usize)>, WireError> {
        let last = self.last;
        let decoded = reader::decode(buf, MESSAGE, |r| record(r, blocks, last))?;
        if let Some((BareRecord::Zero { block, .. } | BareRecord::Page { block, .. }, _)) = &decoded {
            self.last = Some(*block);
        }
        Ok(decoded)
    }
}

fn record(r: &mut Reader<'_>, blocks: &BlockTable, last: Option<usize>) -> Result<BareRecord, Stop> {
    let word = r.u64()?;
    let (flag, offset) = (word & flags::MASK, word & !flags::MASK);
    if word == flags::EOS {
        return Ok(BareRecord::End);
    }
    let is_zero = match flag & !flags::CONTINUE {
        flags::ZERO => true,
        flags::PAGE => false,
        _ => return Err(r.bad(SPEC, format!("word {word:#x} is no page's"))),
    };
    let block = if flag & flags::CONTINUE != 0 {
        last.ok_or_else(|| r.bad(SPEC, "CONTINUE, and no page came before"))?
    } else {
        let name = r.name()?;
        let found = blocks.find(name.as_bytes());
        found.ok_or_else(|| r.bad(SPEC, format!("block {name:?} is not in the block list")))?
    };
    let length = blocks.length_bytes(block);
    if offset >= length {
        let name = blocks.name(block);
        let rule = format!("offset {offset:#x} is beyond block {name:?} of {length:#x} bytes");
        return Err(r.bad(SPEC, rule));
    }
    if !is_zero {
        return Ok(BareRecord::Page { block, offset });
    }
    let fill = r.u8()?;
    if fill != 0 {
        return Err(r.bad(SPEC, format!("a zero page of bytes {fill:02x}")));
    }
    Ok(BareRecord::Zero { block, offset })
}
