//! Virtual time. Each thread has a clock, which advances with its work and with the completions that it polls.

use std::collections::HashMap;
use std::thread::{self, ThreadId};
use std::time::Duration;

/// Virtual time since the network was created.
pub(super) type Time = Duration;

/// The clocks of all threads.
#[derive(Debug, Default)]
pub(super) struct Clocks {
    of: HashMap<ThreadId, Time>,
    latest: Time,
}

impl Clocks {
    /// Time on the clock of the calling thread.
    pub(super) fn now(&self) -> Time {
        self.of.get(&thread::current().id()).copied().unwrap_or_default()
    }

    /// Advances the caller's clock by `time`, and returns the new value.
    pub(super) fn spend(&mut self, time: Duration) -> Time {
        let now = self.now() + time;
        self.set(now);
        now
    }

    /// Advances the caller's clock to `time`, if it is behind. The caller has learned of an event at that time.
    pub(super) fn learn(&mut self, time: Time) {
        if time > self.now() {
            self.set(time);
        }
    }

    /// The latest value of all clocks.
    pub(super) fn latest(&self) -> Time {
        self.latest
    }

    fn set(&mut self, time: Time) {
        self.of.insert(thread::current().id(), time);
        self.latest = self.latest.max(time);
    }
}
