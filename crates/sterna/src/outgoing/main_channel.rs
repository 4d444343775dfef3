//! The main channel of a migration, once it is up.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sterna_transport::Channel;
use sterna_wire::main::Command;

use super::main_stream::MainStream;
use crate::error::MigrationError;

/// How often whoever waits for the end of a phase looks whether there is anybody left to end it.
const PATIENCE: Duration = Duration::from_millis(50);

/// The stream, and the channel that it goes over.
///
/// Over RDMA a lane opens phases, in which nothing else may be written. Whoever wants to write meanwhile waits, and the lane
/// sees that ([`MainChannel::is_wanted`]) and ends the phase as soon as it can.
pub(super) struct MainChannel {
    /// `None` where the guest goes into a file.
    pub channel: Option<Arc<Channel>>,
    pub stream: Arc<Mutex<MainStream>>,
    /// How many wait for the end of a phase.
    waiting: AtomicUsize,
    phase_changed: Condvar,
}

impl MainChannel {
    /// With a stream that nothing was written to.
    pub(super) fn new(channel: Option<Arc<Channel>>, stream: MainStream) -> Arc<Self> {
        let stream = Arc::new(Mutex::new(stream));
        Arc::new(Self { channel, stream, waiting: AtomicUsize::new(0), phase_changed: Condvar::new() })
    }

    /// Writes whole elements; nobody else writes meanwhile.
    pub(super) fn with<T>(
        &self,
        act: impl FnOnce(&mut MainStream) -> Result<T, MigrationError>,
    ) -> Result<T, MigrationError> {
        let mut stream = self.stream.lock();
        if !stream.is_in_phase() {
            return act(&mut stream);
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // After a shutdown nobody need be left who ends the phase.
        while stream.is_in_phase() && !self.channel.as_ref().is_some_and(|channel| channel.is_shut_down()) {
            self.phase_changed.wait_for(&mut stream, PATIENCE);
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        let done = act(&mut stream);
        self.phase_changed.notify_all();
        done
    }

    /// Writes commands, in one go.
    pub(super) fn commands(&self, commands: &[Command]) -> Result<(), MigrationError> {
        self.with(|stream| stream.commands(commands))
    }

    /// Opens a phase of RDMA, after all who waited for the last one's end. `write` writes what it begins with.
    pub(super) fn begin_phase(
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

    /// The phase is over, or will never be: `write` writes what follows it. Then others write.
    pub(super) fn end_phase(
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

    /// Whether somebody waits for the end of a phase.
    pub(super) fn is_wanted(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }
}
