//! A destination that has no VM yet, and makes it from the source's configuration (specs/extension.md §15).
//!
//! Until the VM exists, a [`Shared`] without a VM accepts the connections. The greeter of a main channel reads the
//! configuration ([`prologue`]). The thread `configure` makes the VM and the migration's own [`Shared`] ([`making`]).
//! From then on this is the current one ([`Shared::current`]), and the main channel and all others are greeted there as
//! if they had just connected.

mod listen;
mod making;
mod no_vm;
mod prologue;

use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_transport::{Address, Channel};
use sterna_wire::extension::{CONFIGURATION_PING, ConfigurationRefusal};
use sterna_wire::return_path::ReturnMessage;

use super::accept;
use super::greeting::Greeting;
use super::shared::Shared;
use crate::error::{Awaited, ConfigurationDifference, Difference, Ending, MigrationError};
use crate::interruption::Break;
use crate::shared_settings::SharedSettings;
use crate::threads::tried;
use making::{Agreed, Job};
use prologue::Prologue;

/// Interval at which a waiting connection checks whether it was closed.
const LOOK: Duration = Duration::from_millis(50);

/// The wait for a configuration.
pub(super) struct Configuring {
    settings: SharedSettings,
    /// The settings of this side.
    own: Agreed,
    /// The address as the VMM gave it, for the rules between settings.
    at: Address,
    stage: Mutex<Stage>,
    changed: Condvar,
    /// The migration's own state, once the VM is made.
    made: OnceLock<Arc<Shared>>,
}

enum Stage {
    /// No configuration was accepted. The sender reaches the thread `configure`.
    Waiting(Sender<Job>),
    /// The VM is being made, or one was made.
    Claimed,
    /// The migration is over.
    Over,
}

impl Configuring {
    fn new(settings: SharedSettings, own: Agreed, at: Address, jobs: Sender<Job>) -> Self {
        let stage = Mutex::new(Stage::Waiting(jobs));
        Self { settings, own, at, stage, changed: Condvar::new(), made: OnceLock::new() }
    }

    /// The migration's own state, once the VM is made.
    pub(super) fn made(&self) -> Option<&Arc<Shared>> {
        self.made.get()
    }

    /// Stores the migration's own state. Called under the lock that decides whether the migration was given up.
    pub(super) fn set_made(&self, shared: Arc<Shared>) {
        let _ = self.made.set(shared);
    }

    /// Wakes all who wait: the VM is made, or the migration is over.
    pub(super) fn wake(&self, is_over: bool) {
        if is_over {
            // Dropping the sender ends the thread `configure`.
            *self.stage.lock() = Stage::Over;
        } else {
            drop(self.stage.lock());
        }
        self.changed.notify_all();
    }

    /// Claims the making of the VM for one source. Waits while another source's VM is being made.
    fn claim(&self, channel: &Channel) -> Result<Sender<Job>, Break> {
        let mut stage = self.stage.lock();
        loop {
            if self.made.get().is_some() {
                let peer = channel.peer().to_owned();
                return Err(MigrationError::from(ConfigurationDifference::Taken { peer }).into());
            }
            match &*stage {
                Stage::Over => return Err(Break::Interrupted),
                Stage::Claimed if channel.is_shut_down() => return Err(Break::Interrupted),
                Stage::Claimed => {
                    self.changed.wait_for(&mut stage, LOOK);
                }
                Stage::Waiting(jobs) => {
                    let jobs = jobs.clone();
                    *stage = Stage::Claimed;
                    return Ok(jobs);
                }
            }
        }
    }

    /// Waits until the VM is made: at most `limit`, and longer while it is being made.
    fn wait(&self, channel: &Channel, limit: Duration) -> Result<Arc<Shared>, Break> {
        let until = Instant::now() + limit;
        let mut stage = self.stage.lock();
        loop {
            if let Some(made) = self.made.get() {
                return Ok(Arc::clone(made));
            }
            match &*stage {
                Stage::Over => return Err(Break::Interrupted),
                _ if channel.is_shut_down() => return Err(Break::Interrupted),
                Stage::Waiting(_) if Instant::now() >= until => {
                    let missing = "the main channel, with its configuration,".to_owned();
                    let what = Awaited::Channels { peer: channel.peer().to_owned(), missing };
                    return Err(MigrationError::Limit { what, after: limit }.into());
                }
                _ => {
                    self.changed.wait_for(&mut stage, LOOK);
                }
            }
        }
    }
}

/// Greets a main channel while there is no VM, and afterwards as the main channel of the migration.
pub(super) fn main_channel(
    shared: &Arc<Shared>,
    configuring: &Configuring,
    greeting: &Greeting<'_>,
) -> Result<(), Break> {
    let channel = greeting.channel;
    let mut prologue = Prologue::new(channel, shared.params.limits.setup);
    let made = prologue.read().map_err(Break::from).and_then(|configuration| {
        // A source whose settings do not fit leaves the callback to the next source.
        let settings = making::settings(configuring, &configuration.settings)?;
        let jobs = configuring.claim(channel)?;
        Ok((jobs, settings, configuration.configuration))
    });
    let (jobs, settings, configuration) = match made {
        Ok(made) => made,
        Err(error) => {
            prologue.refuse(&error);
            return Err(error);
        }
    };
    match making::make(shared, &jobs, settings, configuration) {
        Ok(made) => {
            let begun = tried("the main channel of a VM that was just made", || {
                Break::failure(prologue.accept().map_err(Break::from).and_then(|()| begin(&made, channel)))
            });
            // The greeter of the last channel begins the migration, perhaps after this.
            if !made.places.is_complete() {
                // The VM exists and belongs to this source, so that no other can follow.
                made.end_before_it_began(begun.err().unwrap_or_else(|| Ending::Lost.into()));
            }
            Ok(())
        }
        Err(error) => {
            let error = Break::from(error);
            prologue.refuse(&error);
            if let Break::Failed(error) = error {
                shared.end_before_it_began(error);
            }
            Ok(())
        }
    }
}

/// Greets the main channel whose configuration was accepted: the stream begins again.
fn begin(made: &Arc<Shared>, channel: &Arc<Channel>) -> Result<(), Break> {
    made.set_only_main(channel);
    accept::enter(made, channel);
    let greeting = Greeting::among(channel, made.params.limits.setup, &made.greetings);
    let greeted = accept::main_channel(made, &greeting);
    made.greetings.leave(channel);
    greeted
}

/// Keeps a multifd channel until the VM is made, and greets it then.
pub(super) fn multifd(
    shared: &Arc<Shared>,
    configuring: &Configuring,
    greeting: &Greeting<'_>,
) -> Result<(), Break> {
    let channel = greeting.channel;
    let setup = shared.params.limits.setup;
    shared.greetings.lane_came();
    let made = configuring.wait(channel, setup)?;
    accept::enter(&made, channel);
    let greeted = accept::multifd(&made, &Greeting::new(channel, setup));
    made.greetings.leave(channel);
    greeted
}

/// The text of a refusal for the source.
fn refusal(error: &MigrationError) -> ConfigurationRefusal {
    let text = |error: &dyn std::fmt::Display| error.to_string().replace('\0', "\u{fffd}");
    match error {
        MigrationError::PeerIncompatible(Difference::Configuration(ConfigurationDifference::Setting {
            setting,
            limit,
            ..
        })) => ConfigurationRefusal::Setting { name: setting.clone(), limit: limit.clone() },
        MigrationError::Vm(_) | MigrationError::Panicked { .. } => ConfigurationRefusal::Vm(text(error)),
        error => ConfigurationRefusal::Other(text(error)),
    }
}

/// The answer to a configuration from which the VM was made.
const ACCEPTED: ReturnMessage = ReturnMessage::Pong(CONFIGURATION_PING);
