//! Flushes a file to the disk while it is still being written.
//!
//! Without a flush, written bytes stay in the page cache and the disk is idle. The final sync would then write all
//! of them while the guest is paused.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use sterna_ram::threads::{HookPanicked, NewThread, ThreadRole};

use crate::error::TransportError;
use crate::file::PageFile;

/// Pause between two flushes.
const PAUSE: Duration = Duration::from_millis(10);

/// A thread that flushes a file repeatedly. Other threads can write the file meanwhile.
#[derive(Debug)]
pub struct Flusher {
    is_ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<(), TransportError>>>,
}

impl Flusher {
    /// Starts the thread. If that fails, the file is flushed only when it is completed.
    pub fn start(file: &Arc<PageFile>) -> Self {
        let (is_ended, file) = (Arc::new(AtomicBool::new(false)), file.clone());
        let seen = is_ended.clone();
        let thread = NewThread::from(ThreadRole::Flush).spawn(move || {
            while !seen.load(Ordering::Acquire) {
                std::thread::sleep(PAUSE);
                file.sync()?;
            }
            Ok(())
        });
        Self { is_ended, thread: thread.ok() }
    }

    /// Stops the thread and returns its first error. The kernel reports an error of write-back only once, so the
    /// caller must not ignore it.
    ///
    /// # Errors
    /// The error of the flush that failed; the panic of the VMM's hook for new threads ([`HookPanicked`]).
    pub fn end(&mut self) -> Result<(), TransportError> {
        self.is_ended.store(true, Ordering::Release);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(flushed)) => flushed,
            // Only the hook can panic there.
            Some(Err(panic)) => match panic.downcast::<HookPanicked>() {
                Ok(panic) => Err(TransportError::System {
                    channel: "the thread that flushes a file".to_owned(),
                    call: "the VMM's hook",
                    source: std::io::Error::other(*panic),
                }),
                Err(_) => Ok(()),
            },
            None => Ok(()),
        }
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        // A caller that drops the flusher without `end` discards the file, so the error does not matter.
        let _ = self.end();
    }
}
