//! The main connection: an ordered stream in each direction. It delays messages, loses everything
//! after a cut, and ends with or without an orderly close.

use super::planted::Planted;
use super::world::{Item, Link, Message, Side, World};

impl World<'_> {
    /// Sends a message in order. A direction that is cut loses it.
    pub(super) fn send(&mut self, to: Side, message: Message) {
        let delay = self.network_delay();
        let now = self.now;
        let link = self.link_to(to);
        if link.cut {
            return;
        }
        link.last_arrival = link.last_arrival.max(now + delay);
        let (delay, generation) = (link.last_arrival - now, link.generation);
        self.push(delay, Item::Arrives(to, message, generation));
    }

    /// Closes this side's channels in an orderly way.
    pub(super) fn close(&mut self, by: Side) {
        let (open, peer) = match by {
            Side::Source => (&mut self.source.open, Side::Destination),
            Side::Destination => (&mut self.destination.open, Side::Source),
        };
        if !std::mem::replace(open, false) {
            return;
        }
        // A close with unread bytes resets the connection, so data of the source that is under way
        // is lost. The destination reads everything before it closes.
        if by == Side::Source && self.rng.percent(30) {
            self.link_to(peer).generation += 1;
        }
        let now = self.now;
        let link = self.link_to(peer);
        if !link.cut {
            let delay = link.last_arrival.max(now) - now;
            let generation = link.generation;
            self.push(delay, Item::Closed(peer, generation));
        }
    }

    pub(super) fn link_to(&mut self, side: Side) -> &mut Link {
        match side {
            Side::Destination => &mut self.forward,
            Side::Source => &mut self.back,
        }
    }

    pub(super) fn arrives(&mut self, side: Side, message: Message, generation: u32) {
        let hears_lost = side == Side::Source && self.schedule.planted == Some(Planted::HearLostConnection);
        if self.link_to(side).generation != generation && !hears_lost {
            return;
        }
        let (alive, open) = match side {
            Side::Source => (self.source.alive, self.source.open),
            Side::Destination => (self.destination.alive, self.destination.open),
        };
        // A closed side may still handle a message that it read and queued immediately before.
        if !alive || (!open && !self.rng.percent(20)) {
            return;
        }
        match side {
            Side::Source => self.source_reads(message),
            Side::Destination => self.destination_reads(message),
        }
    }

    pub(super) fn broken(&mut self, side: Side) {
        match side {
            Side::Source if self.source.alive && self.source.open => self.source_broken(),
            Side::Destination if self.destination.alive && self.destination.open => {
                self.destination_broken();
            }
            _ => {}
        }
    }
}
