//! Bounds the bytes of a file that the disk has not taken yet, so that a writer notices how fast the disk is.
//!
//! Without the bound the page cache takes everything at once, and the disk's time comes with the last sync.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

/// Most bytes that wait for the disk.
const MOST_BYTES: u64 = 32 << 20;
/// Bytes that are worth a sync.
const SYNC_BYTES: u64 = 8 << 20;

/// The thread that syncs a file while it is written.
pub(super) struct Backlog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    written: u64,
    synced: u64,
    is_over: bool,
    error: Option<io::Error>,
}

impl Backlog {
    pub(super) fn start(file: &File) -> io::Result<Self> {
        let (file, shared) = (file.try_clone()?, Arc::new(Shared::default()));
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("sync".into()).spawn(move || theirs.work(&file))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Notes bytes that were written, and waits while too many are before the disk.
    ///
    /// # Errors
    /// The error of a sync, once.
    pub(super) fn wrote(&self, bytes: u64) -> io::Result<()> {
        let mut state = self.shared.state.lock();
        state.written += bytes;
        self.shared.changed.notify_all();
        self.shared.changed.wait_while(&mut state, |state| {
            state.error.is_none() && state.written - state.synced > MOST_BYTES
        });
        state.error.take().map_or(Ok(()), Err)
    }
}

impl Drop for Backlog {
    fn drop(&mut self) {
        self.shared.state.lock().is_over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in the thread was already reported.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self, file: &File) {
        loop {
            let written = {
                let mut state = self.state.lock();
                self.changed.wait_while(&mut state, |state| {
                    !state.is_over && state.written - state.synced < SYNC_BYTES
                });
                if state.is_over {
                    return;
                }
                state.written
            };
            let synced = file.sync_data();
            let mut state = self.state.lock();
            state.synced = written;
            state.error = state.error.take().or(synced.err());
            self.changed.notify_all();
        }
    }
}
