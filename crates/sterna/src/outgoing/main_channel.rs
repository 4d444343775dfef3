//! The main channel of a migration, after it is connected.

#[cfg(feature = "rdma")]
mod phases;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sterna_transport::Channel;
use sterna_wire::main::Command;

use super::main_stream::MainStream;
use crate::error::MigrationError;

/// The interval at which a thread that waits for a phase's end checks the channel.
///
/// After a shutdown no other thread may be left to end the phase.
const PATIENCE: Duration = Duration::from_millis(50);

/// The stream, and its channel.
///
/// Over RDMA a lane opens phases, in which nothing else may be written. A thread that wants to write waits until
/// the phase ends. The lane sees that, and ends the phase as soon as it can.
pub(super) struct MainChannel {
    /// `None` if the guest is saved into a file.
    pub channel: Option<Arc<Channel>>,
    pub stream: Arc<Mutex<MainStream>>,
    /// The number of threads that wait for the end of a phase.
    waiting: AtomicUsize,
    phase_changed: Condvar,
}

impl MainChannel {
    /// A main channel with a stream to which nothing was written.
    pub(super) fn new(channel: Option<Arc<Channel>>, stream: MainStream) -> Arc<Self> {
        let stream = Arc::new(Mutex::new(stream));
        Arc::new(Self { channel, stream, waiting: AtomicUsize::new(0), phase_changed: Condvar::new() })
    }

    /// Writes whole elements. No other thread writes meanwhile.
    pub(super) fn with<T>(
        &self,
        act: impl FnOnce(&mut MainStream) -> Result<T, MigrationError>,
    ) -> Result<T, MigrationError> {
        let mut stream = self.stream.lock();
        if !stream.is_in_phase() {
            return act(&mut stream);
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        // After a shutdown there may be no thread that ends the phase.
        while stream.is_in_phase() && !self.channel.as_ref().is_some_and(|channel| channel.is_shut_down()) {
            self.phase_changed.wait_for(&mut stream, PATIENCE);
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        let done = act(&mut stream);
        self.phase_changed.notify_all();
        done
    }

    /// Writes all commands in one call.
    pub(super) fn commands(&self, commands: &[Command]) -> Result<(), MigrationError> {
        self.with(|stream| stream.commands(commands))
    }
}
