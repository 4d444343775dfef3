//! The interface that all machines of this crate have in common, so that one driver runs any of them.

use std::fmt::{Debug, Display};
use std::time::Duration;

use crate::{destination, source};

/// A state machine that takes events and returns actions.
///
/// The driver passes the time with each call, and feeds [`Machine::TICK`] when the deadline has passed.
pub trait Machine {
    /// What has happened.
    type Event: Copy + Debug;
    /// What the driver must do.
    type Action;
    /// Why an event was not accepted.
    type Refusal: Display;
    /// How far the machine is.
    type State: Copy + PartialEq;
    /// The event of a deadline that has passed.
    const TICK: Self::Event;

    /// Takes an event, and returns the actions in their order.
    ///
    /// # Errors
    /// The event is not permitted in this state. The machine is unchanged.
    fn handle(&mut self, now: Duration, event: Self::Event) -> Result<Vec<Self::Action>, Self::Refusal>;

    /// The state after the last event.
    fn state(&self) -> Self::State;

    /// The time at which the machine needs a tick; `None` if it waits for an event alone.
    fn deadline(&self) -> Option<Duration>;

    /// Whether later events have no effect, so that a channel's end is no failure. Only a protection's machines
    /// return true.
    fn is_over(&self) -> bool {
        false
    }
}

impl Machine for source::Source {
    type Event = source::Event;
    type Action = source::Action;
    type Refusal = source::Refusal;
    type State = source::State;
    const TICK: Self::Event = source::Event::Tick;

    fn handle(&mut self, now: Duration, event: Self::Event) -> Result<Vec<Self::Action>, Self::Refusal> {
        Self::handle(self, now, event)
    }

    fn state(&self) -> Self::State {
        Self::state(self)
    }

    fn deadline(&self) -> Option<Duration> {
        Self::deadline(self)
    }
}

impl Machine for destination::Destination {
    type Event = destination::Event;
    type Action = destination::Action;
    type Refusal = destination::Refusal;
    type State = destination::State;
    const TICK: Self::Event = destination::Event::Tick;

    fn handle(&mut self, now: Duration, event: Self::Event) -> Result<Vec<Self::Action>, Self::Refusal> {
        Self::handle(self, now, event)
    }

    fn state(&self) -> Self::State {
        Self::state(self)
    }

    fn deadline(&self) -> Option<Duration> {
        Self::deadline(self)
    }
}
