//! Records without sections, as a preempt channel carries them (`specs/postcopy.md §4`).
//!
//! The channel carries only requested pages, so that it needs no section headers.

use super::flags;
use crate::error::WireError;
use crate::multifd::BlockTable;
use crate::reader::{self, Reader, Stop};

const MESSAGE: &str = "record on the preempt channel";
const SPEC: &str = "specs/postcopy.md §4";

/// One record of a preempt channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BareRecord {
    /// This page contains only zeros.
    Zero {
        /// Index in the block list.
        block: usize,
        /// Offset in the block, in bytes: page-aligned and inside the block.
        offset: u64,
    },
    /// [`PAGE_SIZE`](crate::PAGE_SIZE) bytes of this page follow the record.
    Page {
        /// Index in the block list.
        block: usize,
        /// Offset in the block, in bytes: page-aligned and inside the block.
        offset: u64,
    },
    /// The channel carries no more records.
    ///
    /// Sources of machine types up to 7.2 send it before they close the channel.
    End,
}

/// Reads the records of one channel. Remembers the block of the last page.
#[derive(Debug, Clone, Default)]
pub struct BareRecordReader {
    last: Option<usize>,
}

impl BareRecordReader {
    /// A reader for a new channel.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads one record from the start of `buf`; `None` while bytes are missing.
    ///
    /// `blocks` are the machine's RAM blocks.
    ///
    /// # Errors
    /// A word that starts no page; an unknown block; an offset beyond its block; a zero page with a byte other
    /// than 0.
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
        _ => return Err(r.bad(SPEC, format!("word {word:#x} is not a page record"))),
    };
    let block = if flag & flags::CONTINUE != 0 {
        last.ok_or_else(|| r.bad(SPEC, "CONTINUE before the first page"))?
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
