//! State of a network, and its thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use parking_lot::Mutex;

use crate::rdma::double::state::Core;

/// State of the network, and its thread.
#[derive(Debug)]
pub(super) struct World {
    pub(super) core: Arc<Core>,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for World {
    fn drop(&mut self) {
        {
            // Set under the lock, so that the thread has not checked the flag yet, or is already waiting.
            let _state = self.core.state();
            self.core.is_over.store(true, Ordering::SeqCst);
        }
        self.core.wake();
        if let Some(thread) = self.thread.lock().take() {
            // A panic of the thread was already printed, and the test that waited for it has failed.
            let _ = thread.join();
        }
    }
}
