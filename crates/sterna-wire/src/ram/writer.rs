//! Encoder of RAM records (`specs/stream.md §2.3`).

use super::flags;
use crate::PAGE_SIZE;
use crate::error::WireError;
use crate::limits::NAME_BYTES;

const MESSAGE: &str = "RAM record (encoder)";
const SPEC: &str = "specs/stream.md §2.3";

/// Appends records of one channel. Remembers the last page's block, to name it only once.
///
/// Keep one writer for the whole stream, because that memory belongs to the channel and not to the section.
#[derive(Debug, Clone, Default)]
pub struct RamRecordWriter {
    last: Option<usize>,
}

impl RamRecordWriter {
    /// A writer for a new channel.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the next record name its block, as a switch to postcopy requires (§6.3).
    pub fn forget_block(&mut self) {
        self.last = None;
    }

    /// Appends the record of a page that contains only zeros.
    ///
    /// `block` is the caller's number for the block `name`.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for a bad name or an offset that is not page-aligned.
    pub fn zero(
        &mut self,
        block: usize,
        name: &str,
        offset: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        self.word(flags::ZERO, block, name, offset, out)?;
        out.push(0);
        Ok(())
    }

    /// Appends the record before a full page. The caller sends [`PAGE_SIZE`] bytes after it.
    ///
    /// # Errors
    /// As [`zero`](Self::zero).
    pub fn page_header(
        &mut self,
        block: usize,
        name: &str,
        offset: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        self.word(flags::PAGE, block, name, offset, out)
    }

    /// Appends the record of a page that is sent as a delta.
    ///
    /// # Errors
    /// As [`zero`](Self::zero), and for a delta that is not 1 to [`PAGE_SIZE`] bytes.
    pub fn xbzrle(
        &mut self,
        block: usize,
        name: &str,
        offset: u64,
        delta: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        if delta.is_empty() || delta.len() > PAGE_SIZE {
            let rule = format!("a delta of {} bytes, not 1 to {PAGE_SIZE}", delta.len());
            return Err(WireError::local(MESSAGE, 0, "specs/stream.md §2.4", rule));
        }
        self.word(flags::XBZRLE, block, name, offset, out)?;
        out.push(1);
        out.extend_from_slice(&(delta.len() as u16).to_be_bytes());
        out.extend_from_slice(delta);
        Ok(())
    }

    /// Appends the synchronisation point for all multifd channels (§3.5).
    pub fn multifd_flush(out: &mut Vec<u8>) {
        out.extend_from_slice(&flags::MULTIFD_FLUSH.to_be_bytes());
    }

    /// Appends the mark at which a phase of RDMA begins (`specs/rdma.md §5.2`).
    ///
    /// The mark must be the last content of its FILE message. The stream continues after the phase.
    pub fn hook(out: &mut Vec<u8>) {
        out.extend_from_slice(&flags::HOOK.to_be_bytes());
    }

    /// Appends the end of a section's list of records. The footer follows.
    pub fn eos(out: &mut Vec<u8>) {
        out.extend_from_slice(&flags::EOS.to_be_bytes());
    }

    fn word(
        &mut self,
        flag: u64,
        block: usize,
        name: &str,
        offset: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), WireError> {
        if offset & flags::MASK != 0 {
            let rule = format!("offset {offset:#x} is not a multiple of {PAGE_SIZE}");
            return Err(WireError::local(MESSAGE, 0, SPEC, rule));
        }
        if self.last == Some(block) {
            out.extend_from_slice(&(offset | flag | flags::CONTINUE).to_be_bytes());
            return Ok(());
        }
        if name.is_empty() || name.len() > NAME_BYTES || name.contains('\0') {
            let rule = format!("block name {name:?} is not 1 to 255 bytes without NUL");
            return Err(WireError::local(MESSAGE, 8, SPEC, rule));
        }
        out.extend_from_slice(&(offset | flag).to_be_bytes());
        out.push(name.len() as u8);
        out.extend_from_slice(name.as_bytes());
        self.last = Some(block);
        Ok(())
    }
}
