//! A local disk that travels with the guest: its blocks while the guest runs, what has changed since, and in the pause what is
//! left.
//!
//! The stream is a list of records: where a block begins (u64), its length (u32), and what it is (u32): [`DATA`], and then its
//! bytes, or [`ZERO`]. All little-endian. The destination's disk is made empty first, so holes need no record. A record may come
//! again for the same block; the last one counts.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna::{DeviceStream, RemainingState, VmError};
use sterna_disk::Image;

use super::changes::{BLOCK, Changes};

const DATA: u32 = 0;
const ZERO: u32 = 1;
const HEADER_BYTES: usize = 16;
/// For direct I/O.
const ALIGNMENT: usize = 4096;
/// After so many bytes the destination waits for its disk, so that little is left for the pause.
const SYNC_BYTES: u64 = 32 << 20;

/// The disk as a stream, at either side.
pub(super) struct DiskCopy {
    name: String,
    image: Arc<Image>,
    changes: Arc<Changes>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The next block to look at; and whether all blocks were looked at once.
    next: u64,
    /// Source: a record of which a part was read. Destination: one of which a part has come.
    record: Vec<u8>,
    /// Source: how much of `record` was read.
    at: usize,
    /// Destination: bytes since the disk was waited for.
    unsynced: u64,
}

impl DiskCopy {
    pub(super) fn new(index: usize, image: Arc<Image>, changes: Arc<Changes>) -> Self {
        Self { name: format!("disk {index}"), image, changes, state: Mutex::default() }
    }

    fn did<T>(&self, what: &str, result: io::Result<T>) -> Result<T, VmError> {
        result.map_err(|error| VmError::new(format!("{}: {what}", self.name), error))
    }

    /// The next block as a record. False: none is noted.
    fn next_record(&self, state: &mut State) -> io::Result<bool> {
        let taken = self.changes.take(state.next).or_else(|| self.changes.take(0));
        let Some((block, start, length)) = taken else { return Ok(false) };
        state.next = block + 1;
        let mut buffer = vec![0; BLOCK as usize + ALIGNMENT];
        let from = buffer.as_ptr().align_offset(ALIGNMENT);
        let bytes = &mut buffer[from..from + length as usize];
        self.image.read_at(bytes, start).inspect_err(|_| self.changes.note(start, length))?;
        let is_zero = bytes.iter().all(|byte| *byte == 0);
        state.record.clear();
        state.record.extend(start.to_le_bytes());
        state.record.extend((length as u32).to_le_bytes());
        state.record.extend(if is_zero { ZERO } else { DATA }.to_le_bytes());
        if !is_zero {
            state.record.extend_from_slice(bytes);
        }
        state.at = 0;
        Ok(true)
    }

    /// Carries a whole record out.
    fn apply(&self, record: &[u8], header: Header) -> io::Result<()> {
        let Header { start, length, is_data } = header;
        if is_data {
            let mut buffer = vec![0; length as usize + ALIGNMENT];
            let from = buffer.as_ptr().align_offset(ALIGNMENT);
            let bytes = &mut buffer[from..from + length as usize];
            bytes.copy_from_slice(&record[HEADER_BYTES..]);
            return self.image.write_at(bytes, start);
        }
        self.image.make_zero(start, length.into())
    }

    /// The header of a record, checked.
    fn header(&self, record: &[u8]) -> Result<Header, VmError> {
        let word =
            |at: usize| u32::from_le_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]]);
        let (start, length, kind) = (u64::from(word(0)) | u64::from(word(4)) << 32, word(8), word(12));
        let end = start.checked_add(length.into());
        let fits = end.is_some_and(|end| end <= self.image.len_bytes());
        let is_block = start.is_multiple_of(BLOCK) && length > 0 && u64::from(length) <= BLOCK;
        if !(fits && is_block && kind <= ZERO) {
            let why = format!(
                "a record of kind {kind} with {length} bytes from {start:#x} on is none of this disk"
            );
            return Err(VmError::new(self.name.clone(), why));
        }
        Ok(Header { start, length, is_data: kind == DATA })
    }
}

struct Header {
    start: u64,
    length: u32,
    is_data: bool,
}

impl DeviceStream for DiskCopy {
    fn begin_save(&self) -> Result<(), VmError> {
        *self.state.lock() = State::default();
        self.changes.track(self.image.len_bytes());
        self.did("finding its data", self.image.find_data(|start, length| self.changes.note(start, length)))
    }

    fn remaining(&self) -> Result<RemainingState, VmError> {
        let state = self.state.lock();
        let unread = (state.record.len() - state.at) as u64;
        Ok(RemainingState { dirty_bytes: self.changes.bytes() + unread, ..RemainingState::default() })
    }

    fn read(&self, to: &mut [u8]) -> Result<usize, VmError> {
        let mut state = self.state.lock();
        let mut read = 0;
        while read < to.len() {
            if state.at == state.record.len() && !self.did("reading it", self.next_record(&mut state))? {
                break;
            }
            let length = (to.len() - read).min(state.record.len() - state.at);
            to[read..read + length].copy_from_slice(&state.record[state.at..state.at + length]);
            (read, state.at) = (read + length, state.at + length);
        }
        Ok(read)
    }

    /// The machine has stopped its virtio devices when it stopped its vCPUs: everything that was written is noted.
    fn stop(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn end_save(&self) -> Result<(), VmError> {
        self.changes.end();
        *self.state.lock() = State::default();
        Ok(())
    }

    fn begin_load(&self) -> Result<(), VmError> {
        *self.state.lock() = State::default();
        self.did("emptying it", self.image.make_zero(0, self.image.len_bytes()))
    }

    fn write(&self, mut bytes: &[u8]) -> Result<(), VmError> {
        let mut state = self.state.lock();
        while !bytes.is_empty() {
            let missing = HEADER_BYTES.saturating_sub(state.record.len()).min(bytes.len());
            state.record.extend_from_slice(&bytes[..missing]);
            bytes = &bytes[missing..];
            if state.record.len() < HEADER_BYTES {
                return Ok(());
            }
            let header = self.header(&state.record)?;
            let whole = HEADER_BYTES + if header.is_data { header.length as usize } else { 0 };
            let missing = (whole - state.record.len()).min(bytes.len());
            state.record.extend_from_slice(&bytes[..missing]);
            bytes = &bytes[missing..];
            if state.record.len() < whole {
                return Ok(());
            }
            state.unsynced += u64::from(header.length);
            self.did("writing it", self.apply(&state.record, header))?;
            state.record.clear();
            if state.unsynced >= SYNC_BYTES {
                state.unsynced = 0;
                self.did("writing it", self.image.sync())?;
            }
        }
        Ok(())
    }

    /// What the guest has flushed at the source is safe here, too.
    fn finish_load(&self, _configuration: &[u8]) -> Result<(), VmError> {
        let left = self.state.lock().record.len();
        if left > 0 {
            return Err(VmError::new(
                self.name.clone(),
                format!("the stream ends after {left} bytes of a record"),
            ));
        }
        self.did("writing it", self.image.sync())
    }

    fn end_load(&self) -> Result<(), VmError> {
        *self.state.lock() = State::default();
        Ok(())
    }

    fn run(&self) -> Result<(), VmError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
