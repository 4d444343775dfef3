//! How the control thread waits: it keeps statistics and keepalives up meanwhile, and gives way to the machine.

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

/// How often a thread that waits wakes by itself: whoever changes what it waits for wakes it at once.
const PATIENCE: Duration = Duration::from_millis(50);

/// What is due while the control thread waits.
pub(super) struct Waits {
    shared: Arc<Shared>,
    /// Kept alive, once it is up.
    main: Option<Arc<MainChannel>>,
    keepalive: Instant,
}

impl Waits {
    /// Of a migration that has no channel yet.
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, main: None, keepalive: Instant::now() }
    }

    /// The main channel is up, or gone.
    pub(super) fn keep_alive(&mut self, main: Option<Arc<MainChannel>>) {
        self.main = main;
    }

    /// The main channel was not silent: no keepalive is due for a while.
    pub(super) fn was_not_silent(&mut self) {
        self.keepalive = Instant::now();
    }

    /// Waits until `check` has something.
    pub(super) fn until<T>(&mut self, mut check: impl FnMut() -> Option<T>) -> Result<T, Break> {
        loop {
            if let Some(got) = self.at_most(PATIENCE, &mut check)? {
                return Ok(got);
            }
        }
    }

    /// As [`Waits::until`], and no longer than `patience`.
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

    /// What is due while nothing is to be done.
    pub(super) fn idle(&mut self) {
        let counts = self.shared.counters.now();
        self.shared.statistics.lock().observe(counts);
        if let Err(error) = self.send_keepalive() {
            self.shared.fail(error);
        }
    }

    /// Lets a Sterna peer know that this side lives, when the main channel was silent for long.
    fn send_keepalive(&mut self) -> Result<(), MigrationError> {
        let every = self.shared.params().limits.stall / 4;
        let (peer, state) = self.shared.driver.inspect(|machine| (machine.peer(), machine.state()));
        let goes_on = match state {
            // Nothing may follow EOF.
            State::Postcopy => !self.shared.postcopy.has_ended(),
            state => !state.is_committed() && !state.is_final(),
        };
        let is_wanted = peer.sterna && goes_on;
        match &self.main {
            Some(main) if is_wanted && self.keepalive.elapsed() >= every => {
                self.keepalive = Instant::now();
                self.shared.probes.lock().send_keepalive();
                main.commands(&[Command::Ping(extension::KEEPALIVE_PING)])
            }
            _ => Ok(()),
        }
    }
}
