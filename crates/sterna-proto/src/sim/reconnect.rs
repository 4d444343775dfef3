//! Connections that replace a lost one: dials, the destination's answers, and old dials that arrive
//! late or twice.

use super::dials::DialEnd;
use super::planted::Planted;
use super::world::{Item, Message, SECOND, Side, World};
use crate::{destination, source};

/// How long the source waits for the answer to a dial.
const DIAL_LIMIT: u64 = 3 * SECOND;

impl World<'_> {
    pub(super) fn dial(&mut self) {
        self.dials.last += 1;
        self.dials.is_waiting = true;
        let number = self.dials.last;
        let at = self.network_delay();
        self.push(at, Item::Dial(number));
        if self.rng.percent(20) {
            // The network delivers the dial a second time, perhaps much later.
            let at = self.network_delay() + self.rng.below(4 * SECOND);
            self.push(at, Item::Dial(number));
        }
        self.push(DIAL_LIMIT, Item::DialEnds(number, DialEnd::Nothing));
    }

    /// Handles a dial that reaches the destination's address.
    pub(super) fn dialled(&mut self, number: u32) {
        if self.now < self.asks_blocked_until || !self.destination.alive {
            return;
        }
        let is_stale = number <= self.dials.taken || self.dials.pending.is_some_and(|other| other >= number);
        if is_stale && self.schedule.planted != Some(Planted::TakeStaleDial) {
            return;
        }
        let Some(machine) = &self.destination.machine else { return };
        if machine.would_suspend() {
            // The source has noticed the loss before the destination.
            self.dials.pending = Some(number);
            return self.destination_event(destination::Event::ConnectionLost);
        }
        match machine.state() {
            destination::State::Suspending => self.dials.pending = Some(number),
            destination::State::Suspended => {
                self.dials.pending = Some(number);
                self.resume_pending();
            }
            destination::State::Failed => self.dial_ends(number, DialEnd::Refused),
            _ => {}
        }
    }

    /// Accepts a dial that arrived while the lost session was ending.
    pub(super) fn resume_pending(&mut self) {
        let Some(number) = self.dials.pending.take() else { return };
        if number <= self.dials.taken {
            self.violate("invariant 1: the destination took a session again");
        }
        if self.facts.never {
            self.violate("invariant 1: the destination continues after it had answered never");
        }
        self.dials.taken = number;
        for side in [Side::Source, Side::Destination] {
            let now = self.now;
            let link = self.link_to(side);
            link.cut = false;
            link.generation += 1;
            link.last_arrival = now;
        }
        // The answer is the first message over the new connection.
        let (at, generation) = (self.network_delay(), self.forward.generation);
        self.push(at, Item::DialEnds(number, DialEnd::Taken(generation)));
        self.back.last_arrival += at;
        self.destination.open = true;
        self.facts.prepared = false;
        self.facts.final_arrived = false;
        self.facts.loaded = false;
        self.destination_event(destination::Event::Resumed);
    }

    /// May deliver an answer that the destination sent over an earlier connection.
    pub(super) fn lost_connection_comes_back(&mut self) {
        if self.dials.last > 0 && self.rng.percent(30) {
            let (at, generation) = (self.rng.below(2_000), self.back.generation.wrapping_sub(1));
            self.push(at, Item::Arrives(Side::Source, Message::PreparePong, generation));
        }
    }

    fn dial_ends(&mut self, number: u32, end: DialEnd) {
        let at = self.network_delay();
        self.push(at, Item::DialEnds(number, end));
    }

    /// Handles the result of a dial at the source. The result of a dial that the source has dropped
    /// is ignored.
    pub(super) fn dial_ended(&mut self, number: u32, end: DialEnd) {
        let is_lost = self.back.cut && matches!(end, DialEnd::Taken(_));
        let is_current = number == self.dials.last && self.dials.is_waiting && !is_lost;
        if is_current {
            self.dials.is_waiting = false;
        }
        let is_wanted = self.source.alive && self.source_state() == Some(source::State::Reconnecting);
        if !is_current || !is_wanted {
            // The destination's process, or the kernel if that process is dead, closes the unused
            // connection.
            if let DialEnd::Taken(generation) = end {
                let at = self.network_delay() + if is_lost { DIAL_LIMIT } else { 0 };
                self.push(at, Item::Closed(Side::Destination, generation));
            }
            return;
        }
        let event = match end {
            DialEnd::Taken(_) => {
                self.source.open = true;
                source::Event::Reconnected
            }
            DialEnd::Refused => source::Event::ReconnectRefused,
            DialEnd::Nothing => source::Event::ReconnectFailed,
        };
        self.source_event(event);
    }
}
