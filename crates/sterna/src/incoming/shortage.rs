//! A host that refuses connections, for example because this process has too many open files.

use std::io;
use std::time::{Duration, Instant};

use sterna_transport::shortage_advice;

use super::shared::Shared;
use crate::error::MigrationError;

/// How long a migration waits if its channels cannot be accepted. Longer than a silent connection is kept,
/// because that connection's descriptor is then free.
const PATIENCE: Duration = Duration::from_secs(12);

/// The time since which a listener cannot accept connections.
#[derive(Default)]
pub(super) struct Shortage {
    since: Option<Instant>,
    has_ended_it: bool,
}

impl Shortage {
    /// Resets the time, because a connection was accepted.
    pub(super) fn is_over(&mut self) {
        self.since = None;
    }

    /// Handles a connection that could not be accepted. Returns a warning the first time. If this lasts, a
    /// migration that has not begun fails, because its channels cannot connect.
    pub(super) fn met(&mut self, shared: &Shared, why: &io::Error) -> Option<String> {
        let Some(since) = self.since else {
            self.since = Some(Instant::now());
            return Some(format!("cannot accept a connection now: {why}{}", shortage_advice(why)));
        };
        if !self.has_ended_it && since.elapsed() >= PATIENCE.min(shared.params.limits.setup) {
            let what = format!(
                "connections could not be accepted for {} s: {why}{}",
                since.elapsed().as_secs(),
                shortage_advice(why)
            );
            // If the migration has begun, all its channels are connected.
            shared.end_before_it_began(MigrationError::System(what, None));
            self.has_ended_it = true;
        }
        None
    }
}
