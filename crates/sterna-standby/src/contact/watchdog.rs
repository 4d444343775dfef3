//! A watchdog of the primary's host, which is fed as long as the lease lasts.
//!
//! When the lease ends, this process stops the guest, but only if the process runs. A process may be stopped, starved
//! of CPU time or swapped out for longer than its lease. Its guest then continues to run, or runs when the process
//! wakes. A watchdog that is no longer fed resets the host instead.

use std::time::Duration;

/// Number of feedings within the watchdog's timeout.
const FEEDS: u32 = 8;

/// Resets this host, unless it is fed in time.
pub trait Watchdog: Send + Sync {
    /// Starts the watchdog with its longest timeout that is at most `longest`. Returns the timeout: the time from the
    /// last feeding to the reset.
    ///
    /// # Errors
    /// The watchdog cannot be used, or has no timeout that is short enough. It is then not running.
    fn arm(&self, longest: Duration) -> Result<Duration, String>;
    /// Restarts the timeout.
    ///
    /// # Errors
    /// The watchdog was not fed.
    fn feed(&self) -> Result<(), String>;
    /// Stops the watchdog: the host is not reset any more.
    ///
    /// # Errors
    /// The watchdog continues to run.
    fn disarm(&self) -> Result<(), String>;
}

/// Feeds `watchdog` while `may_feed` returns `Some(true)`, until it returns `None`; then disarms it.
pub(super) fn keep(watchdog: &dyn Watchdog, timeout: Duration, may_feed: &dyn Fn() -> Option<bool>) {
    let pause = timeout / FEEDS;
    let mut is_starved = false;
    while let Some(may_feed) = may_feed() {
        if may_feed && let Err(error) = watchdog.feed() {
            tracing::error!(error, "the watchdog is not fed");
        }
        if !may_feed && !std::mem::replace(&mut is_starved, true) {
            tracing::warn!(
                ?timeout,
                "the lease ends, and the guest is not stopped yet: the watchdog resets this host if that does not succeed"
            );
        }
        is_starved &= !may_feed;
        std::thread::sleep(pause);
    }
    if let Err(error) = watchdog.disarm() {
        tracing::error!(error, "the watchdog runs on, and resets this host");
    }
}
