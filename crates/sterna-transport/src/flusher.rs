//! Putting a file on the disk while it is written.
//!
//! What is written through the page cache would lie there until somebody asks for it on the disk, and the disk would be
//! idle until then. Somebody asks when the guest is stopped and waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::{PageFile, TransportError};

/// Between two flushes.
const PAUSE: Duration = Duration::from_millis(10);

/// A thread that flushes a file over and over. Whoever else writes the file goes on meanwhile.
#[derive(Debug)]
pub struct Flusher {
    is_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), TransportError>>>,
}

impl Flusher {
    /// Begins. Without a thread the file is flushed at the end alone.
    pub fn start(file: &Arc<PageFile>) -> Self {
        let (is_ended, file) = (Arc::new(AtomicBool::new(false)), file.clone());
        let seen = is_ended.clone();
        let thread = std::thread::Builder::new().name("flush".into()).spawn(move || {
            while !seen.load(Ordering::Acquire) {
                std::thread::sleep(PAUSE);
                file.sync()?;
            }
            Ok(())
        });
        Self { is_ended, thread: thread.ok() }
    }

    /// Ends it. The kernel tells an error of writing back once only, so it must be heard here.
    ///
    /// # Errors
    /// Why the file could not be put on the disk.
    pub fn end(&mut self) -> Result<(), TransportError> {
        self.is_ended.store(true, Ordering::Release);
        // It does nothing that could panic.
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or(Ok(()))
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        // Who drops it does not want the file any more.
        let _ = self.end();
    }
}
