//! Makes what is written to a disk durable while more is written, so that little is left for the pause.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use sterna_disk::Image;

/// So many bytes are worth a sync.
const WORTH_BYTES: u64 = 8 << 20;
/// And fewer are if so long nothing came.
const IDLE: Duration = Duration::from_millis(20);
/// Whoever writes waits when so many bytes are not durable.
const MOST_BYTES: u64 = 64 << 20;

/// A thread that syncs. It ends when this is dropped.
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

    /// So many bytes were written. Waits while too many are not durable.
    ///
    /// # Errors
    /// What a sync has said since the last call.
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

    /// Ends the thread. What came last is not durable yet.
    ///
    /// # Errors
    /// As [`Durable::wrote`]. The host tells an error once, so a later sync would not say it again.
    pub(super) fn end(mut self) -> io::Result<()> {
        self.join();
        self.shared.progress.lock().failed.take().map_or(Ok(()), Err)
    }

    fn join(&mut self) {
        self.shared.progress.lock().is_over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It cannot panic: nothing in it does.
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
