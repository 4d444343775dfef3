//! A status question that is on its way.

use std::sync::Arc;

use parking_lot::Mutex;
use sterna_transport::{CancelFlag, Channel};

/// A question that is being asked.
#[derive(Clone, Default)]
pub(super) struct Asking {
    pub connecting: CancelFlag,
    pub channel: Arc<Mutex<Option<Arc<Channel>>>>,
}

impl Asking {
    /// Ends it, from any thread.
    pub(super) fn stop(&self) {
        self.connecting.cancel();
        if let Some(channel) = &*self.channel.lock() {
            channel.shutdown();
        }
    }
}
