//! Waits of the control thread, which keep statistics and keepalives up to date.
//!
//! A wait ends when the machine has another action.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_proto::source::State;
use sterna_wire::extension;
use sterna_wire::main::Command;

use super::main_channel::MainChannel;
use super::shared::Shared;
use crate::driver::Waited;
use crate::error::MigrationError;
use crate::interruption::Break;

/// The interval at which a waiting thread wakes by itself. A change of its condition wakes it immediately.
const PATIENCE: Duration = Duration::from_millis(50);

/// Periodic work of the control thread while it waits.
pub(super) struct Waits {
    shared: Arc<Shared>,
    /// The channel to keep alive, after it is connected.
    main: Option<Arc<MainChannel>>,
    keepalive: Instant,
}

impl Waits {
    /// The waits of a migration that has no channel yet.
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, main: None, keepalive: Instant::now() }
    }

    /// Sets the main channel to keep alive; `None` after it was closed.
    pub(super) fn keep_alive(&mut self, main: Option<Arc<MainChannel>>) {
        self.main = main;
    }

    /// Call it after writing to the main channel: no keepalive is due for a while.
    pub(super) fn was_not_silent(&mut self) {
        self.keepalive = Instant::now();
    }

    /// Waits until `check` gives a value.
    pub(super) fn until<T>(&mut self, mut check: impl FnMut() -> Option<T>) -> Result<T, Break> {
        loop {
            if let Some(got) = self.at_most(PATIENCE, &mut check)? {
                return Ok(got);
            }
        }
    }

    /// Waits until `check` gives a value, at most for `patience`.
    pub(super) fn at_most<T>(
        &mut self,
        patience: Duration,
        mut check: impl FnMut() -> Option<T>,
    ) -> Result<Option<T>, Break> {
        let until = Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.shared.driver.wait(left.min(PATIENCE), &mut check) {
                Waited::Got(got) => return Ok(Some(got)),
                Waited::Interrupted => return Err(Break::Interrupted),
                Waited::TimedOut => self.idle(),
            }
            if left <= PATIENCE {
                return Ok(None);
            }
        }
    }

    /// The periodic work: statistics and keepalives.
    pub(super) fn idle(&mut self) {
        let counts = self.shared.measures.counters.now();
        self.shared.measures.statistics.lock().observe(counts);
        if let Err(error) = self.send_keepalive() {
            self.shared.fail(error);
        }
    }

    /// Sends a Sterna peer a keepalive if the main channel was silent for long.
    fn send_keepalive(&mut self) -> Result<(), MigrationError> {
        let every = self.shared.params().limits.stall / 4;
        let (peer, state) = self.shared.driver.inspect(|machine| (machine.peer(), machine.state()));
        let goes_on = match state {
            // No element may follow EOF.
            State::Postcopy => !self.shared.postcopy.has_ended(),
            state => !state.is_committed() && !state.is_final(),
        };
        let is_wanted = peer.sterna && goes_on;
        match &self.main {
            Some(main) if is_wanted && self.keepalive.elapsed() >= every => {
                self.keepalive = Instant::now();
                self.shared.measures.probes.lock().send_keepalive();
                main.commands(&[Command::Ping(extension::KEEPALIVE_PING)])
            }
            _ => Ok(()),
        }
    }
}
