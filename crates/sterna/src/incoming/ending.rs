//! The end of an incoming migration: requested by an operator, by the last handle, or reached.

use std::time::{Duration, Instant};

use sterna_proto::destination::{Destination, Event as Fed, Refusal, State};

use super::arrival::Arrival;
use super::shared::Shared;
use crate::driver::Driver;
use crate::error::MigrationError;

impl Shared {
    /// Cancels the migration on an operator's request, before or after it has begun. With `held` a held guest
    /// is discarded as well.
    pub(super) fn abandon(&self, held: bool) -> Result<(), Refusal> {
        if self.end_before_it_began(MigrationError::Cancelled) {
            return Ok(());
        }
        if let Some(made) = self.successor() {
            return made.abandon(held);
        }
        // Recorded only if the machine accepts: a refused request must not hide another error.
        self.feed(if held { Fed::Discard } else { Fed::Abandon })
            .map(|()| self.note_error(MigrationError::Cancelled))
    }

    /// Closes everything when the last handle is dropped.
    pub(super) fn close(&self) {
        self.closing.cancel();
        // A held guest may be the only copy, so it stays loaded and the VMM can start it. The machine refuses
        // the event after the end, which is correct.
        let is_held = |driver: &Driver<Destination>| driver.inspect(Destination::state) == State::Held;
        if !self.end_before_it_began(MigrationError::Cancelled) && !self.driver().is_some_and(is_held) {
            let _ = self.feed(Fed::Abandon);
        }
        if let Some(follower) = self.target.follower() {
            follower.end();
        }
        self.greetings.end();
        self.changed.notify_all();
        if let Some(made) = self.successor() {
            made.close();
        }
    }

    pub(super) fn end(&self, arrival: Arrival) {
        self.arrival.lock().get_or_insert(arrival);
        self.changed.notify_all();
        self.bell.ring();
    }

    pub(super) fn arrival(&self) -> Option<Arrival> {
        match self.successor() {
            Some(made) => made.arrival(),
            None => self.arrival.lock().clone(),
        }
    }

    pub(super) fn wait(&self) -> Arrival {
        let mut arrival = self.arrival.lock();
        loop {
            if let Some(arrival) = &*arrival {
                return arrival.clone();
            }
            if let Some(made) = self.successor() {
                drop(arrival);
                return made.wait();
            }
            self.changed.wait(&mut arrival);
        }
    }

    /// As [`Shared::wait`], for at most `limit`.
    pub(super) fn wait_timeout(&self, limit: Duration) -> Option<Arrival> {
        let until = Instant::now() + limit;
        let mut arrival = self.arrival.lock();
        loop {
            if arrival.is_some() {
                return arrival.clone();
            }
            let left = until.saturating_duration_since(Instant::now());
            if let Some(made) = self.successor() {
                drop(arrival);
                return made.wait_timeout(left);
            }
            if left.is_zero() {
                return None;
            }
            self.changed.wait_for(&mut arrival, left);
        }
    }
}
