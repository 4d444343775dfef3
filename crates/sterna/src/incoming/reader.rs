//! Bytes of the main channel, as the decoder wants them: from the front of a buffer.

use std::sync::Arc;

use sterna_ram::RamSlice;
use sterna_transport::{Channel, TransportError};

use crate::error::MigrationError;

/// Read at once.
const CHUNK: usize = 256 * 1024;

/// What came of waiting for bytes.
pub(super) enum More {
    Bytes,
    /// The channel has ended.
    End,
    /// Nothing within the channel's stall limit.
    Silence,
}

pub(super) struct Reader {
    channel: Arc<Channel>,
    buffer: Vec<u8>,
    start: usize,
}

impl Reader {
    pub fn new(channel: Arc<Channel>) -> Self {
        Self { channel, buffer: Vec::with_capacity(2 * CHUNK), start: 0 }
    }

    /// What is there and not consumed.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    pub fn consume(&mut self, count: usize) {
        self.start += count;
    }

    /// Reads on until `count` bytes are there. False: the channel ended before.
    pub fn fill(&mut self, count: usize) -> Result<bool, MigrationError> {
        Ok(self.fill_or_fail(count)?)
    }

    fn fill_or_fail(&mut self, count: usize) -> Result<bool, TransportError> {
        while self.bytes().len() < count {
            self.buffer.drain(..self.start);
            self.start = 0;
            let held = self.buffer.len();
            self.buffer.resize(held + CHUNK.max(count - held), 0);
            let read = self.channel.read_some(&mut self.buffer[held..]);
            self.buffer.truncate(held + read.as_ref().copied().unwrap_or(0));
            if read? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits for at least one more byte.
    pub fn more(&mut self) -> Result<More, MigrationError> {
        match self.fill_or_fail(self.bytes().len() + 1) {
            Ok(true) => Ok(More::Bytes),
            Ok(false) => Ok(More::End),
            Err(TransportError::Stalled { .. }) => Ok(More::Silence),
            Err(error) => Err(error.into()),
        }
    }

    /// Fills `place` from the front. False: the channel ended before.
    pub fn fill_ram(&mut self, place: RamSlice<'_>) -> Result<bool, MigrationError> {
        if !self.fill(place.len())? {
            return Ok(false);
        }
        place.copy_from(&self.buffer[self.start..self.start + place.len()]);
        self.consume(place.len());
        Ok(true)
    }
}
