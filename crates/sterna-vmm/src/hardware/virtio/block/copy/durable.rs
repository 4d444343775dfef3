//! Syncs a disk in the background while more is written. The final sync during the pause is then short.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sterna_disk::Image;

/// Number of written bytes that triggers a sync.
const WORTH_BYTES: u64 = 8 << 20;
/// A sync of fewer bytes starts after this time without a write.
const IDLE: Duration = Duration::from_millis(20);
/// Number of bytes that are not durable above which a writer waits.
const MOST_BYTES: u64 = 64 << 20;

/// A thread that syncs the disk. It ends when this value is dropped.
pub(super) struct Durable {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    image: Arc<Image>,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Progress {
    written: u64,
    durable: u64,
    failed: Option<io::Error>,
    is_over: bool,
}

impl Durable {
    pub(super) fn new(image: Arc<Image>) -> io::Result<Self> {
        let shared = Arc::new(Shared { image, progress: Mutex::default(), changed: Condvar::new() });
        let thread = std::thread::Builder::new().name("disk sync".to_owned()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.run()
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Records that `bytes` were written. Waits while too many bytes are not durable.
    ///
    /// # Errors
    /// The error of a sync since the last call.
    pub(super) fn wrote(&self, bytes: u64) -> io::Result<()> {
        let mut progress = self.shared.progress.lock();
        progress.written += bytes;
        if progress.written - progress.durable >= WORTH_BYTES {
            self.shared.changed.notify_all();
        }
        while progress.failed.is_none() && progress.written - progress.durable > MOST_BYTES {
            self.shared.changed.wait(&mut progress);
        }
        progress.failed.take().map_or(Ok(()), Err)
    }

    /// Ends the thread. The last bytes are not durable yet.
    ///
    /// # Errors
    /// The same as for [`Durable::wrote`]. The host reports an error once, so a later sync would not report
    /// it again.
    pub(super) fn end(mut self) -> io::Result<()> {
        self.join();
        self.shared.progress.lock().failed.take().map_or(Ok(()), Err)
    }

    fn join(&mut self) {
        self.shared.progress.lock().is_over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread contains no code that panics.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        let mut progress = self.progress.lock();
        while !progress.is_over {
            let (written, waiting) = (progress.written, progress.written - progress.durable);
            if waiting < WORTH_BYTES {
                let came = !self.changed.wait_for(&mut progress, IDLE).timed_out();
                if came || waiting == 0 || progress.written != written {
                    continue;
                }
            }
            let written = progress.written;
            let synced = parking_lot::MutexGuard::unlocked(&mut progress, || self.image.sync());
            progress.durable = written;
            if let Err(error) = synced {
                progress.failed = Some(error);
            }
            self.changed.notify_all();
        }
    }
}

impl Drop for Durable {
    fn drop(&mut self) {
        self.join();
    }
}
