//! The machines of a protection, as a driver runs them.

use std::time::Duration;

use super::{primary, standby};
use crate::machine::Machine;

impl Machine for primary::Primary {
    type Event = primary::Event;
    type Action = primary::Action;
    type Refusal = primary::Refusal;
    type State = primary::State;
    const TICK: Self::Event = primary::Event::Tick;

    fn handle(&mut self, now: Duration, event: Self::Event) -> Result<Vec<Self::Action>, Self::Refusal> {
        Self::handle(self, now, event)
    }

    fn state(&self) -> Self::State {
        Self::state(self)
    }

    fn deadline(&self) -> Option<Duration> {
        Self::deadline(self)
    }

    fn is_over(&self) -> bool {
        Self::state(self).is_final()
    }
}

impl Machine for standby::Standby {
    type Event = standby::Event;
    type Action = standby::Action;
    type Refusal = standby::Refusal;
    type State = standby::State;
    const TICK: Self::Event = standby::Event::Tick;

    fn handle(&mut self, now: Duration, event: Self::Event) -> Result<Vec<Self::Action>, Self::Refusal> {
        Self::handle(self, now, event)
    }

    fn state(&self) -> Self::State {
        Self::state(self)
    }

    fn deadline(&self) -> Option<Duration> {
        Self::deadline(self)
    }

    fn is_over(&self) -> bool {
        Self::state(self).is_final()
    }
}
