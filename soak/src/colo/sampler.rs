//! Samples continuously whether the guest runs on both sides.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna::{RunState, SourceVm};
use sterna_guests::ProcessGuest;

/// Observations of the sampler.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seen {
    /// Time since which both sides ran, and for how long.
    pub(super) both: Option<(Instant, Duration)>,
    /// The longest time between two samples. A long gap means that the host did not schedule this process.
    pub(super) longest_gap: Duration,
}

pub(super) struct Sampler {
    seen: Arc<Mutex<Seen>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    pub(super) fn new(here: &Arc<ProcessGuest>, there: &Arc<ProcessGuest>) -> Self {
        let (seen, ends) = (Arc::<Mutex<Seen>>::default(), Arc::<AtomicBool>::default());
        let thread = std::thread::spawn({
            let (here, there) = (Arc::clone(here), Arc::clone(there));
            let (seen, ends) = (Arc::clone(&seen), Arc::clone(&ends));
            move || {
                let mut last = Instant::now();
                while !ends.load(Ordering::SeqCst) {
                    // A guest that runs at the standby keeps running. Therefore both ran at the time of the
                    // second read.
                    let both =
                        there.run_state() == RunState::Running && here.run_state() == RunState::Running;
                    let mut seen = seen.lock();
                    if both {
                        let since = seen.both.map_or_else(Instant::now, |(since, _)| since);
                        seen.both = Some((since, since.elapsed()));
                    }
                    seen.longest_gap = seen.longest_gap.max(last.elapsed());
                    drop(seen);
                    last = Instant::now();
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        Self { seen, ends, thread: Some(thread) }
    }

    pub(super) fn seen(&self) -> Seen {
        *self.seen.lock()
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
