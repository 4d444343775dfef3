//! The main channel of a migration into a file: bytes at a position that advances.

use std::sync::Arc;

use parking_lot::Mutex;
use sterna_transport::{IoPart, PageFile, PageQueue, QueueOptions};

use crate::error::MigrationError;
use crate::outgoing::main_stream::Sink;

/// Writes bytes to a file from front to back, and skips the places of pages.
pub(in crate::outgoing) struct FileStream {
    state: Mutex<FileStreamState>,
}

struct FileStreamState {
    queue: PageQueue,
    at: u64,
}

impl FileStream {
    /// A stream from byte `at` of `file` on.
    pub(in crate::outgoing) fn new(file: &Arc<PageFile>, at: u64) -> Self {
        Self {
            state: Mutex::new(FileStreamState { queue: PageQueue::new(file, QueueOptions::default()), at }),
        }
    }

    /// The file position of the next byte.
    pub(super) fn position(&self) -> u64 {
        self.state.lock().at
    }

    /// Moves the position to `at`. Other writers fill the bytes in between.
    pub(super) fn go_to(&self, at: u64) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        state.at = at;
        // The collected bytes must be written before other threads write next to them.
        state.queue.drain().map_err(MigrationError::storage)
    }

    /// Writes all collected bytes to the kernel.
    pub(in crate::outgoing) fn drain(&self) -> Result<(), MigrationError> {
        self.state.lock().queue.drain().map_err(MigrationError::storage)
    }
}

impl Sink for FileStream {
    fn write_parts(&self, parts: &[IoPart<'_>]) -> Result<(), MigrationError> {
        let mut state = self.state.lock();
        for part in parts {
            let length = match part {
                IoPart::Bytes(bytes) => bytes.len(),
                IoPart::Ram(window) => window.len(),
            };
            let at = state.at;
            state.queue.write_copy(at, part).map_err(MigrationError::storage)?;
            state.at += length as u64;
        }
        Ok(())
    }
}
