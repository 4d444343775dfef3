//! Ctrl-C (and SIGTERM, SIGHUP) as a count that loops look at, so that a command can end in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use sterna_transport::PageFile;

use crate::exit::{Status, Stop};
use crate::terminal;

/// How often we were asked to end.
#[derive(Debug, Clone, Default)]
pub struct Interrupts(Arc<AtomicUsize>);

impl Interrupts {
    /// From now on signals are counted instead of ending the process.
    pub fn catch() -> Result<Self, Stop> {
        let count = Self::default();
        let counted = count.clone();
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])
            .map_err(|error| Stop::failed(format!("cannot catch Ctrl-C: {error}")))?;
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                loop {
                    // Those that came at once are counted at once: nobody sees the first alone.
                    counted.0.fetch_add(signals.wait().count(), Ordering::AcqRel);
                }
            })
            .map_err(|error| Stop::failed(format!("cannot start a thread for Ctrl-C: {error}")))?;
        Ok(count)
    }

    /// For commands that do nothing but make files: from now on a signal removes those that lie aside and ends the
    /// process, so that no guest's memory stays behind on a disk.
    pub fn remove_files() -> Result<(), Stop> {
        // A hangup ends what is not under nohup by itself; its files are told of by the next run.
        let mut signals = Signals::new([SIGINT, SIGTERM])
            .map_err(|error| Stop::failed(format!("cannot catch Ctrl-C: {error}")))?;
        let end = move || {
            if signals.forever().next().is_some() {
                PageFile::remove_staging_files();
                terminal::complain(&Stop::with(
                    Status::Cancelled,
                    "interrupted; the incomplete output is removed",
                ));
                std::process::exit(Status::Cancelled.code().into());
            }
        };
        let thread = std::thread::Builder::new().name("signals".into()).spawn(end);
        thread.map(drop).map_err(|error| Stop::failed(format!("cannot start a thread for Ctrl-C: {error}")))
    }

    /// How many so far.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    /// Counts one: what a signal does, and what `quit` over QMP does.
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    /// Waits that long, or until there are more than `seen`.
    pub fn sleep(&self, time: Duration, seen: usize) {
        let end = Instant::now() + time;
        while self.count() <= seen {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(Duration::from_millis(20)));
        }
    }
}
