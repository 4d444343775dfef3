//! Acquires the guest's external resources (hooks) before the commit, and gives them back if the commit does
//! not happen.

use std::time::Duration;

use sterna_proto::destination::{Destination, Event as Fed, State};

use super::Control;
use crate::driver::{Driver, Waited};
use crate::error::MigrationError;
use crate::events::Event;
use crate::hooks::Hook;
use crate::threads::{call, caught, tried};

/// How long this side waits to learn that a source has closed its channels.
const CLOSING: Duration = Duration::from_secs(1);

impl Control {
    pub(super) fn acquire_hooks(&mut self, driver: &Driver<Destination>) {
        for hook in self.shared.target.hooks().into_iter().skip(self.acquired.len()) {
            let name = hook.name();
            let acquired = tried(&format!("Hook::acquire of {name}"), || hook.acquire());
            if let Err(error) = acquired {
                if matches!(error, MigrationError::Panicked { .. }) {
                    // The hook may own its resource in spite of the panic, and the source is about to acquire
                    // it again.
                    self.give_back(hook.as_ref());
                }
                if !self.is_lost_soon(driver) {
                    self.shared.note_error(error);
                }
                return self.shared.report(Fed::HookAcquireFailed);
            }
            self.acquired.push(hook);
        }
        self.left_held = false;
        self.shared.report(Fed::HooksAcquired);
    }

    /// Whether a failed hook is explained by a lost connection. A source that has lost the connection closes
    /// its channels, acquires its hooks again, and reconnects. This waits for the closing.
    fn is_lost_soon(&self, driver: &Driver<Destination>) -> bool {
        let may_be = |machine: &Destination| machine.would_suspend() || machine.state() == State::Suspending;
        // A lost connection leads to an action of the machine, which interrupts the wait.
        driver.inspect(may_be) && !matches!(driver.wait(CLOSING, || None::<()>), Waited::TimedOut)
    }

    /// Gives all hooks back. A hook that fails does not stop the others.
    pub(super) fn give_back_hooks(&mut self) {
        while let Some(hook) = self.acquired.pop() {
            self.give_back(hook.as_ref());
        }
        let event = if self.left_held { Fed::HookGiveBackFailed } else { Fed::HooksGivenBack };
        self.shared.report(event);
    }

    fn give_back(&mut self, hook: &dyn Hook) {
        let given_back = caught("Hook::give_back", || {
            call(format!("Hook::give_back of {}", hook.name()), || hook.give_back());
        });
        if let Err(error) = given_back {
            self.shared.tell(&Event::Warning(error.to_string()));
            self.left_held = true;
        }
    }
}
