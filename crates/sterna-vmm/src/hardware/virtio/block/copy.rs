//! A local disk that is copied with its guest. Its blocks are sent while the guest runs, then the blocks
//! changed meanwhile. The remaining blocks are sent while the guest is paused.
//!
//! The stream is a list of records, all little-endian: first byte of a block (u64), its length (u32), and its
//! kind (u32). The kind is [`DATA`], followed by the block's bytes, or [`ZERO`]. The destination's disk is
//! emptied first, so holes need no record. Several records may name the same block; the last one counts.

mod durable;
mod record;

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use sterna::{AskCheckpoint, DeviceStream, EpochStream, RemainingState, VmError};
use sterna_disk::Image;

use super::changes::{BLOCK, Changes};
use durable::Durable;
use record::{DATA, HEADER_BYTES, Header, Record, ZERO};

/// A copied disk as a device stream, on either side.
pub(super) struct DiskCopy {
    name: String,
    image: Arc<Image>,
    changes: Arc<Changes>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The next block to examine.
    next: u64,
    record: Record,
    /// Syncs the disk at the destination during the load.
    durable: Option<Durable>,
}

impl DiskCopy {
    pub(super) fn new(index: usize, image: Arc<Image>, changes: Arc<Changes>) -> Self {
        Self { name: format!("disk {index}"), image, changes, state: Mutex::default() }
    }

    fn did<T>(&self, what: &str, result: io::Result<T>) -> Result<T, VmError> {
        result.map_err(|error| VmError::new(format!("{}: {what}", self.name), error))
    }

    /// Takes the next recorded block: its first byte and length.
    fn take(&self, state: &mut State) -> Option<(u64, usize)> {
        let (block, start, length) = self.changes.take(state.next).or_else(|| self.changes.take(0))?;
        state.next = block + 1;
        Some((start, length as usize))
    }

    /// Reads the data of a block that was taken.
    fn read_block(&self, bytes: &mut [u8], start: u64) -> io::Result<Header> {
        let length = bytes.len();
        self.image.read_at(bytes, start).inspect_err(|_| self.changes.note(start, length as u64))?;
        let kind = if bytes.iter().all(|byte| *byte == 0) { ZERO } else { DATA };
        Ok(Header { start, length: length as u32, kind })
    }

    /// Prepares the next block as a record that is taken in pieces. False if no block is recorded.
    fn next_record(&self, state: &mut State) -> io::Result<bool> {
        let Some((start, length)) = self.take(state) else { return Ok(false) };
        let header = self.read_block(state.record.block(length), start)?;
        state.record.header = header.encode();
        (state.record.at, state.record.length) = (0, HEADER_BYTES + header.body_bytes());
        Ok(true)
    }

    /// Reads the next block as a record into `header` and `body`. `body` has room for any block. Returns the
    /// record's length; 0 if no block is recorded.
    fn read_record(&self, state: &mut State, header: &mut [u8], body: &mut [u8]) -> io::Result<usize> {
        let Some((start, length)) = self.take(state) else { return Ok(0) };
        let read = self.read_block(&mut body[..length], start)?;
        header.copy_from_slice(&read.encode());
        Ok(HEADER_BYTES + read.body_bytes())
    }

    /// Applies a record to the disk.
    fn apply(&self, header: Header, body: &[u8]) -> io::Result<()> {
        match header.kind {
            DATA => self.image.write_at(body, header.start),
            _ => self.image.make_zero(header.start, header.length.into()),
        }
    }

    fn header(&self, bytes: [u8; HEADER_BYTES]) -> Result<Header, VmError> {
        Header::decode(bytes, self.image.len_bytes()).map_err(|why| VmError::new(self.name.clone(), why))
    }

    /// Completes the current record with these bytes and applies it. Returns its header and the remaining
    /// bytes; None if it is incomplete.
    fn carry_out<'a>(
        &self,
        record: &mut Record,
        bytes: &'a [u8],
    ) -> Result<Option<(Header, &'a [u8])>, VmError> {
        // Avoids a copy if the whole record is in `bytes`. Direct I/O needs an aligned buffer instead.
        if record.at == 0
            && !self.image.is_direct()
            && let Some((header, rest)) = bytes.split_first_chunk()
        {
            let header = self.header(*header)?;
            if let Some((body, rest)) = rest.split_at_checked(header.body_bytes()) {
                self.did("writing it", self.apply(header, body))?;
                return Ok(Some((header, rest)));
            }
        }
        let bytes = &bytes[record.put(bytes, HEADER_BYTES)..];
        if record.at < HEADER_BYTES {
            return Ok(None);
        }
        let header = self.header(record.header)?;
        let end = HEADER_BYTES + header.body_bytes();
        let rest = &bytes[record.put(bytes, end)..];
        if record.at < end {
            return Ok(None);
        }
        self.did("writing it", self.apply(header, record.block(header.body_bytes())))?;
        record.at = 0;
        Ok(Some((header, rest)))
    }
}

impl DeviceStream for DiskCopy {
    fn begin_save(&self) -> Result<(), VmError> {
        *self.state.lock() = State::default();
        self.changes.track(self.image.len_bytes());
        self.did("finding its data", self.image.find_data(|start, length| self.changes.note(start, length)))
    }

    fn remaining(&self) -> Result<RemainingState, VmError> {
        let state = self.state.lock();
        let unread = (state.record.length - state.record.at) as u64;
        Ok(RemainingState { dirty_bytes: self.changes.bytes() + unread, ..RemainingState::default() })
    }

    fn read(&self, to: &mut [u8]) -> Result<usize, VmError> {
        let mut state = self.state.lock();
        let mut read = 0;
        while read < to.len() {
            if state.record.at < state.record.length {
                read += state.record.take(&mut to[read..]);
                continue;
            }
            let room = to[read..].split_at_mut_checked(HEADER_BYTES);
            let is_read = match room {
                // Reads directly into the send buffer.
                Some((header, body)) if body.len() as u64 >= BLOCK && !self.image.is_direct() => {
                    self.read_record(&mut state, header, body).map(|length| {
                        read += length;
                        length > 0
                    })
                }
                _ => self.next_record(&mut state),
            };
            if !self.did("reading it", is_read)? {
                break;
            }
        }
        Ok(read)
    }

    /// Nothing to do. Stopping the vCPUs also stopped the virtio devices, so all writes are recorded.
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
        self.did("emptying it", self.image.make_zero(0, self.image.len_bytes()))?;
        let durable = self.did("writing it", Durable::new(Arc::clone(&self.image)))?;
        self.state.lock().durable = Some(durable);
        Ok(())
    }

    fn write(&self, mut bytes: &[u8]) -> Result<(), VmError> {
        let mut state = self.state.lock();
        let State { record, durable, .. } = &mut *state;
        // After an error, a retry begins with a whole record.
        while let Some((header, rest)) = self.carry_out(record, bytes).inspect_err(|_| record.at = 0)? {
            bytes = rest;
            if let Some(durable) = durable {
                self.did("writing it", durable.wrote(header.length.into()))?;
            }
        }
        Ok(())
    }

    /// Syncs the disk. Data that the guest flushed at the source must be durable here too.
    fn finish_load(&self, _configuration: &[u8]) -> Result<(), VmError> {
        let (left, durable) = {
            let mut state = self.state.lock();
            (state.record.at, state.durable.take())
        };
        if left > 0 {
            return Err(VmError::new(
                self.name.clone(),
                format!("the stream ends after {left} bytes of a record"),
            ));
        }
        let synced = durable.map_or(Ok(()), Durable::end);
        self.did("writing it", synced.and_then(|()| self.image.sync()))
    }

    fn end_load(&self) -> Result<(), VmError> {
        *self.state.lock() = State::default();
        Ok(())
    }

    fn run(&self) -> Result<(), VmError> {
        Ok(())
    }

    fn epochs(&self) -> Option<&dyn EpochStream> {
        Some(self)
    }
}

/// The guest's writes of an epoch go to this disk immediately. They are read back block by block at the end
/// of the epoch.
impl EpochStream for DiskCopy {
    fn limit(&self, limit_bytes: u64, ask: AskCheckpoint) {
        self.changes.limit(limit_bytes, ask);
    }

    fn check_epoch(&self, mut bytes: &[u8]) -> Result<(), VmError> {
        let cut = || VmError::new(self.name.clone(), "an epoch ends within a record");
        while !bytes.is_empty() {
            let (header, rest) = bytes.split_first_chunk().ok_or_else(cut)?;
            let length = self.header(*header)?.body_bytes();
            (_, bytes) = rest.split_at_checked(length).ok_or_else(cut)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
