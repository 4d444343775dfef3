//! The main channel of a migration, once it is up.

use std::sync::Arc;

use parking_lot::Mutex;
use sterna_transport::Channel;
use sterna_wire::main::Command;

use super::main_stream::MainStream;
use crate::error::MigrationError;

/// The stream, and the channel that it goes over.
pub(super) struct MainChannel {
    /// `None` where the guest goes into a file.
    pub channel: Option<Arc<Channel>>,
    pub stream: Arc<Mutex<MainStream>>,
}

impl MainChannel {
    /// With a stream that nothing was written to.
    pub(super) fn new(channel: Option<Arc<Channel>>, stream: MainStream) -> Arc<Self> {
        Arc::new(Self { channel, stream: Arc::new(Mutex::new(stream)) })
    }

    /// Writes whole elements; nobody else writes meanwhile.
    pub(super) fn with<T>(
        &self,
        act: impl FnOnce(&mut MainStream) -> Result<T, MigrationError>,
    ) -> Result<T, MigrationError> {
        act(&mut self.stream.lock())
    }

    /// Writes commands, in one go.
    pub(super) fn commands(&self, commands: &[Command]) -> Result<(), MigrationError> {
        self.with(|stream| stream.commands(commands))
    }
}
