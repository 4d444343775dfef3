//! The threads of a migration, except the control thread.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::shared::Shared;
use crate::error::MigrationError;
use crate::threads::{self, NewThread};

/// The threads of lanes, of save threads and of the return path.
pub(super) struct Workers {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
}

impl Workers {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, handles: Vec::new() }
    }

    /// Starts a thread. If it panics, the migration fails.
    pub(super) fn spawn(
        &mut self,
        thread: impl Into<NewThread>,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), MigrationError> {
        let shared = Arc::clone(&self.shared);
        let died = move |error| {
            shared.fail(error);
            shared.driver.nudge();
        };
        self.handles.push(threads::spawn(thread, work, died)?);
        Ok(())
    }

    /// Waits until all threads have ended.
    pub(super) fn join(&mut self) {
        for handle in self.handles.drain(..) {
            // A thread that panicked has already reported the error.
            let _ = handle.join();
        }
    }
}
