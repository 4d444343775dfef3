//! Phases of RDMA on the main channel: a thread opens one, and then nothing else is written.

use std::sync::atomic::Ordering;

use super::MainChannel;
use crate::error::MigrationError;
use crate::outgoing::main_stream::MainStream;

impl MainChannel {
    /// Opens a phase of RDMA. `write` writes its beginning.
    ///
    /// Threads that waited for the end of the last phase write first.
    pub(in crate::outgoing) fn begin_phase(
        &self,
        write: impl FnOnce(&mut MainStream) -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        let mut stream = self.stream.lock();
        self.phase_changed.wait_while(&mut stream, |stream| {
            stream.is_in_phase() || self.waiting.load(Ordering::Relaxed) > 0
        });
        write(&mut stream)?;
        stream.set_in_phase(true);
        Ok(())
    }

    /// Ends a phase, or gives it up. `write` writes the data that follows it. Then other threads may write.
    pub(in crate::outgoing) fn end_phase(
        &self,
        write: impl FnOnce(&mut MainStream) -> Result<(), MigrationError>,
    ) -> Result<(), MigrationError> {
        let mut stream = self.stream.lock();
        stream.set_in_phase(false);
        let written = write(&mut stream);
        drop(stream);
        self.phase_changed.notify_all();
        written
    }

    /// Whether a thread waits for the end of a phase.
    pub(in crate::outgoing) fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}
