//! Counts Ctrl-C (and SIGTERM, SIGHUP, SIGXCPU). Loops read the count, so that a command can clean up before
//! it ends.
//!
//! A command catches signals first of all, and its loops compare with the requests that they have already answered,
//! beginning with none. A loop that took the count at its start as its base would lose a Ctrl-C that came just
//! before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXCPU};
use signal_hook::iterator::Signals;

use sterna_transport::{CancelFlag, PageFile};

use crate::exit::{Status, Stop};
use crate::terminal;

/// How long a process that ends waits for the servers with its uploads.
const ABANDON_LIMIT: Duration = Duration::from_secs(20);
/// Flags of the running [`until_interrupted`] calls. The next signal cancels them.
static WAITS: Mutex<Vec<(usize, CancelFlag)>> = Mutex::new(Vec::new());

/// Calls `act`, which waits. A signal during the call cancels the flag; an earlier signal does not.
pub fn until_interrupted<T>(act: impl FnOnce(&CancelFlag) -> T) -> T {
    static NUMBERS: AtomicUsize = AtomicUsize::new(0);
    let (number, flag) = (NUMBERS.fetch_add(1, Ordering::Relaxed), CancelFlag::new());
    WAITS.lock().push((number, flag.clone()));
    let done = act(&flag);
    WAITS.lock().retain(|(other, _)| *other != number);
    done
}

/// Signals that ask a process to end. SIGHUP is left out if it is ignored (`nohup`).
fn ending() -> Vec<i32> {
    let hangup = (!is_ignored(SIGHUP)).then_some(SIGHUP);
    [SIGINT, SIGTERM, SIGXCPU].into_iter().chain(hangup).collect()
}

/// Whether this process was started with the signal ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignores(&status, signal)
}

/// As [`is_ignored`], from the text of `/proc/PID/status`.
fn ignores(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Removes unfinished images, and ends uploads to object storages. A second signal does not wait for them.
fn abandon(signals: &mut Signals) {
    let (sender, done) = std::sync::mpsc::channel();
    let undo = move || {
        sterna_store::remove_unfinished();
        let _ = sender.send(());
    };
    if std::thread::Builder::new().name("signals".into()).spawn(undo).is_err() {
        return sterna_store::remove_unfinished();
    }
    let deadline = Instant::now() + ABANDON_LIMIT;
    while Instant::now() < deadline && signals.pending().next().is_none() {
        match done.recv_timeout(Duration::from_millis(20)) {
            Err(RecvTimeoutError::Timeout) => {}
            _ => return,
        }
    }
    terminal::note("sterna: warning: an upload may be left; `sterna store gc` removes it after a day");
}

/// Number of requests to end, shared by all clones.
#[derive(Debug, Clone, Default)]
pub struct Interrupts {
    count: Arc<AtomicUsize>,
    /// A signal other than Ctrl-C was among them.
    must_end: Arc<AtomicBool>,
}

impl Interrupts {
    /// From now on, signals are counted instead of ending the process.
    pub fn catch() -> Result<Self, Stop> {
        let count = Self::default();
        let counted = count.clone();
        let mut signals = Signals::new(ending()).map_err(|error| {
            Stop::failed(format!(
                "cannot install the handler for Ctrl-C: \
                                                            {error}"
            ))
        })?;
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                let mut was_cpu_time = false;
                loop {
                    // The kernel repeats SIGXCPU every second. Only the first one counts as a request of the
                    // operator.
                    let is_new =
                        |signal: &i32| *signal != SIGXCPU || !std::mem::replace(&mut was_cpu_time, true);
                    // Signals that arrived together are counted in one step, so that no loop sees an
                    // intermediate count.
                    let new: Vec<_> = signals.wait().filter(is_new).collect();
                    counted.must_end.fetch_or(new.iter().any(|signal| *signal != SIGINT), Ordering::AcqRel);
                    counted.count.fetch_add(new.len(), Ordering::AcqRel);
                    WAITS.lock().iter().for_each(|(_, flag)| flag.cancel());
                }
            })
            .map_err(|error| Stop::failed(format!("cannot start a thread for Ctrl-C: {error}")))?;
        Ok(count)
    }

    /// For commands that only create files. From now on, a signal removes staging files and ends the process.
    /// Otherwise a guest's memory would stay on a disk.
    pub fn remove_files() -> Result<(), Stop> {
        let mut signals = Signals::new(ending()).map_err(|error| {
            Stop::failed(format!(
                "cannot install the handler for Ctrl-C: \
                                                            {error}"
            ))
        })?;
        let end = move || {
            if signals.forever().next().is_some() {
                PageFile::remove_staging_files();
                abandon(&mut signals);
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

    /// The number of requests since [`catch`](Self::catch).
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Whether SIGTERM, SIGHUP or SIGXCPU was received. An operator's Ctrl-C may answer a question; these signals only ask to end.
    pub fn must_end(&self) -> bool {
        self.must_end.load(Ordering::Acquire)
    }

    /// Adds one request. Signals and `quit` over QMP do this.
    pub fn add(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
    }

    /// Waits for `time`, or until the count exceeds `seen`.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_is_ignored_if_the_status_says_so() {
        let status = "Name:\tsterna\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0000000000000002\n";

        assert!(ignores(status, SIGHUP));
        assert!(!ignores(status, SIGINT));
        assert!(!ignores("", SIGHUP));
    }

    #[test]
    fn wait_that_is_over_is_not_cancelled_by_a_later_signal() {
        let flag = until_interrupted(|flag| {
            WAITS.lock().iter().for_each(|(_, flag)| flag.cancel());
            assert!(flag.is_cancelled(), "a signal during the wait");
            CancelFlag::clone(flag)
        });

        assert!(flag.is_cancelled());
        assert!(until_interrupted(|flag| !flag.is_cancelled()), "a signal before the wait");
        assert!(WAITS.lock().is_empty());
    }
}
