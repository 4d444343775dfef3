//! The place of a VM that is made from the source's configuration, and who waits for it.
//!
//! `S` is the migration's own state, which is made with the VM.

use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use sterna_ram::missing_pages::MissingPagesError;
use sterna_transport::{Address, Channel};

use crate::error::{Awaited, ConfigurationDifference, MigrationError};
use crate::interruption::Break;
use crate::params::{Capabilities, Parameters};
use crate::rules::{self, Features, Side};
use crate::shared_settings::{Settings, SharedSettings};

/// The settings of a migration after both sides have agreed.
pub(super) type Agreed = (Parameters, Capabilities);

/// A configuration from which the VM is to be made.
pub(super) struct Job<S> {
    pub shared: Arc<S>,
    pub agreed: Agreed,
    pub configuration: Vec<u8>,
    pub answer: Sender<Result<Arc<S>, MigrationError>>,
}

/// Interval at which a waiting connection checks whether it was closed.
const LOOK: Duration = Duration::from_millis(50);

/// The wait for a configuration.
pub(super) struct Configuring<S> {
    settings: SharedSettings,
    /// The settings of this side.
    own: Agreed,
    /// The address as the VMM gave it, for the rules between settings.
    at: Address,
    /// Whether this host can run a guest before its pages are there. Found out before the engine's threads start, so
    /// that a sandbox need not permit the system calls to the threads that meet the source.
    probed: Result<(), Arc<MissingPagesError>>,
    stage: Mutex<Stage<S>>,
    changed: Condvar,
    /// The migration's own state, once the VM is made.
    made: OnceLock<Arc<S>>,
}

enum Stage<S> {
    /// No configuration was accepted. The sender reaches the thread `configure`.
    Waiting(Sender<Job<S>>),
    /// The VM is being made, or one was made.
    Claimed,
    /// The migration is over.
    Over,
}

impl<S> Configuring<S> {
    pub(super) fn new(
        settings: SharedSettings,
        own: Agreed,
        at: Address,
        probed: Result<(), Arc<MissingPagesError>>,
        jobs: Sender<Job<S>>,
    ) -> Self {
        let stage = Mutex::new(Stage::Waiting(jobs));
        Self { settings, own, at, probed, stage, changed: Condvar::new(), made: OnceLock::new() }
    }

    /// The settings for a source with the shared settings `theirs`. An error leaves the VM to another source.
    pub(super) fn agree(&self, theirs: &Settings) -> Result<Agreed, MigrationError> {
        let (params, capabilities) = self.own.clone();
        let (params, capabilities) = self.settings.agree(theirs, params, capabilities)?;
        rules::check(Features::of(&self.at, &params, &capabilities), Side::Destination)
            .map_err(ConfigurationDifference::Excluded)?;
        if capabilities.postcopy_ram
            && let Err(error) = &self.probed
        {
            return Err(no_postcopy(error).into());
        }
        Ok((params, capabilities))
    }

    /// The migration's own state, once the VM is made.
    pub(super) fn made(&self) -> Option<&Arc<S>> {
        self.made.get()
    }

    /// Stores the migration's own state. Called under the lock that decides whether the migration was given up.
    pub(super) fn set_made(&self, shared: Arc<S>) {
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
    pub(super) fn claim(&self, channel: &Channel) -> Result<Sender<Job<S>>, Break> {
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
    pub(super) fn wait(&self, channel: &Channel, limit: Duration) -> Result<Arc<S>, Break> {
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

/// Lets the thread `configure` make the VM, and waits for it.
pub(super) fn make<S>(
    shared: &Arc<S>,
    jobs: &Sender<Job<S>>,
    agreed: Agreed,
    configuration: Vec<u8>,
) -> Result<Arc<S>, MigrationError> {
    let (answer, answered) = mpsc::channel();
    let job = Job { shared: Arc::clone(shared), agreed, configuration, answer };
    let ended = || MigrationError::Internal("the thread that makes the VM has ended".to_owned());
    jobs.send(job).map_err(|_| ended())?;
    answered.recv().map_err(|_| ended())?
}

/// The difference if this side cannot run a guest before its pages are there.
pub(super) fn no_postcopy(why: &dyn std::fmt::Display) -> ConfigurationDifference {
    let (setting, value) = ("postcopy-ram".to_owned(), Some("on".to_owned()));
    ConfigurationDifference::Setting { setting, value, limit: format!("only off ({why})") }
}
