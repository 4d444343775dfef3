//! A status question to the destination, after a lost acknowledgement.

use std::sync::Arc;

use parking_lot::Mutex;
use sterna_transport::{CancelFlag, Channel};

/// A question that waits for its answer.
#[derive(Clone, Default)]
pub(super) struct Asking {
    pub connecting: CancelFlag,
    pub channel: Arc<Mutex<Option<Arc<Channel>>>>,
}

impl Asking {
    /// Cancels the question, from any thread.
    pub(super) fn stop(&self) {
        self.connecting.cancel();
        if let Some(channel) = &*self.channel.lock() {
            channel.shutdown();
        }
    }
}
