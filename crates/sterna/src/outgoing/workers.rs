//! The threads of a migration, but for the control thread itself.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::shared::Shared;
use crate::error::MigrationError;
use crate::threads;

/// Lanes, save threads, the return path.
pub(super) struct Workers {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
}

impl Workers {
    /// None yet.
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, handles: Vec::new() }
    }

    /// Starts one. If it panics, the migration fails.
    pub(super) fn spawn(
        &mut self,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        let died = move |error| {
            shared.fail(error);
            shared.driver.nudge();
        };
        self.handles.push(threads::spawn(name, work, died)?);
        Ok(())
    }

    /// Waits until all have ended.
    pub(super) fn join(&mut self) {
        for handle in self.handles.drain(..) {
            // One that panicked has said so.
            let _ = handle.join();
        }
    }
}
