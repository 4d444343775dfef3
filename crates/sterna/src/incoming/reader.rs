//! A buffered reader of the main channel or a file. The decoder takes bytes from the front of the buffer.

use std::sync::Arc;

use sterna_ram::RamSlice;
use sterna_transport::{Channel, PageFile, TransportError};

use crate::error::MigrationError;

/// Bytes of one read.
const CHUNK: usize = 256 * 1024;

/// The result of waiting for more bytes.
pub(super) enum More {
    Bytes,
    /// The channel has ended.
    End,
    /// No byte arrived within the channel's stall limit.
    Silence,
}

/// The result of waiting for a number of bytes.
pub(super) enum Filled {
    Full,
    /// The channel ended before the number was reached.
    End,
    /// No byte arrived within the channel's stall limit. Earlier bytes are kept.
    Silence(TransportError),
}

/// The origin of the bytes.
enum Source {
    Channel(Arc<Channel>),
    /// A file, and the offset of the next read.
    File(Arc<PageFile>, u64),
}

impl Source {
    /// Reads some bytes. 0: the end is reached.
    fn read_some(&mut self, to: &mut [u8]) -> Result<usize, TransportError> {
        match self {
            Self::Channel(channel) => channel.read_some(to),
            Self::File(file, at) => {
                let left = file.len_bytes()?.saturating_sub(*at);
                let count = usize::try_from(left).unwrap_or(usize::MAX).min(to.len());
                file.read_bytes_at(*at, &mut to[..count])?;
                *at += count as u64;
                Ok(count)
            }
        }
    }
}

pub(super) struct Reader {
    source: Source,
    /// Constant size, unless an item is larger. Resizing at each read would zero the new bytes each time.
    buffer: Vec<u8>,
    /// The bytes from `start` to `end` are read and not consumed.
    start: usize,
    end: usize,
}

impl Reader {
    pub(super) fn new(channel: Arc<Channel>) -> Self {
        Self::over(Source::Channel(channel))
    }

    /// Reads a file from byte `at` on.
    pub(super) fn of_file(file: &Arc<PageFile>, at: u64) -> Self {
        Self::over(Source::File(Arc::clone(file), at))
    }

    fn over(source: Source) -> Self {
        Self { source, buffer: vec![0; 2 * CHUNK], start: 0, end: 0 }
    }

    /// Continues at byte `at` of a file.
    pub(super) fn go_to(&mut self, at: u64) -> Result<(), MigrationError> {
        let Source::File(_, next) = &mut self.source else {
            return Err(MigrationError::Internal("a channel has no places to go to".to_owned()));
        };
        *next = at;
        (self.start, self.end) = (0, 0);
        Ok(())
    }

    /// The bytes that are read and not consumed.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
    }

    /// Reads until `count` bytes are buffered. False: the channel ended before.
    pub(super) fn fill(&mut self, count: usize) -> Result<bool, MigrationError> {
        Ok(self.fill_or_fail(count)?)
    }

    /// As [`Reader::fill`], but silence is not an error.
    pub(super) fn fill_or_silence(&mut self, count: usize) -> Result<Filled, MigrationError> {
        match self.fill_or_fail(count) {
            Ok(true) => Ok(Filled::Full),
            Ok(false) => Ok(Filled::End),
            Err(stalled @ TransportError::Stalled { .. }) => Ok(Filled::Silence(stalled)),
            Err(error) => Err(error.into()),
        }
    }

    fn fill_or_fail(&mut self, count: usize) -> Result<bool, TransportError> {
        while self.bytes().len() < count {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            let due = CHUNK.max(count - self.end);
            if self.buffer.len() < self.end + due {
                self.buffer.resize(self.end + due, 0);
            }
            let read = self.source.read_some(&mut self.buffer[self.end..self.end + due])?;
            if read == 0 {
                return Ok(false);
            }
            self.end += read;
        }
        Ok(true)
    }

    /// Waits for at least one more byte.
    pub(super) fn more(&mut self) -> Result<More, MigrationError> {
        match self.fill_or_fail(self.bytes().len() + 1) {
            Ok(true) => Ok(More::Bytes),
            Ok(false) => Ok(More::End),
            Err(TransportError::Stalled { .. }) => Ok(More::Silence),
            Err(error) => Err(error.into()),
        }
    }

    /// Copies buffered and new bytes into `place` until it is full. False: the channel ended before.
    pub(super) fn fill_ram(&mut self, place: RamSlice<'_>) -> Result<bool, MigrationError> {
        if !self.fill(place.len())? {
            return Ok(false);
        }
        place.copy_from(&self.buffer[self.start..self.start + place.len()])?;
        self.consume(place.len());
        Ok(true)
    }
}
