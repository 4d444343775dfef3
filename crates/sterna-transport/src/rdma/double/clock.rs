//! Virtual time: a clock for each thread, carried on by what threads learn from each other through the network.

use std::collections::HashMap;
use std::thread::{self, ThreadId};
use std::time::Duration;

/// Time since the network was made.
pub(super) type Time = Duration;

/// The threads' clocks.
#[derive(Debug, Default)]
pub(super) struct Clocks {
    of: HashMap<ThreadId, Time>,
    latest: Time,
}

impl Clocks {
    /// What the caller's clock says.
    pub(super) fn now(&self) -> Time {
        self.of.get(&thread::current().id()).copied().unwrap_or_default()
    }

    /// The caller works for so long.
    pub(super) fn spend(&mut self, time: Duration) -> Time {
        let now = self.now() + time;
        self.set(now);
        now
    }

    /// The caller learns of what happened at `time`.
    pub(super) fn learn(&mut self, time: Time) {
        if time > self.now() {
            self.set(time);
        }
    }

    /// The latest time of any clock.
    pub(super) fn latest(&self) -> Time {
        self.latest
    }

    fn set(&mut self, time: Time) {
        self.of.insert(thread::current().id(), time);
        self.latest = self.latest.max(time);
    }
}
