//! The connection: an ordered stream in each direction. It delays messages, loses everything after
//! a cut, and ends.

use super::schedule::SECOND;
use super::state::{Item, Message, Side};
use super::world::World;

impl World<'_> {
    pub(super) fn send(&mut self, to: Side, message: Message) {
        let mut delay = 50 + self.rng.below(2_000);
        if matches!(message, Message::Pages(_) | Message::Checkpoint(_)) {
            delay += self.rng.below(20_000);
        }
        if self.phase.is_slow && self.rng.percent(5) {
            delay += self.rng.below(3 * SECOND);
        }
        let now = self.now;
        let link = &mut self.links[to as usize];
        if link.is_cut {
            return;
        }
        link.last_arrival = link.last_arrival.max(now + delay);
        let (delay, generation) = (link.last_arrival - now, link.generation);
        self.push(delay, Item::Arrives(to, message, generation));
    }

    pub(super) fn arrives(&mut self, side: Side, message: Message, generation: u32) {
        if self.links[side as usize].generation != generation {
            return;
        }
        match side {
            Side::Primary if self.primary.is_alive && self.primary.is_open => self.primary_reads(message),
            Side::Standby if self.standby.is_alive && self.standby.is_open => self.standby_reads(message),
            _ => {}
        }
    }

    /// Closes this side's channels. The peer sees the close after the earlier messages.
    pub(super) fn close(&mut self, by: Side) {
        let (is_open, peer) = match by {
            Side::Primary => (&mut self.primary.is_open, Side::Standby),
            Side::Standby => (&mut self.standby.is_open, Side::Primary),
        };
        if std::mem::replace(is_open, false) {
            self.peer_notices(peer);
        }
    }

    /// Ends the connection for the peer. Messages that were sent before may still arrive first.
    pub(super) fn peer_notices(&mut self, peer: Side) {
        let now = self.now;
        let link = &mut self.links[peer as usize];
        if !link.is_cut {
            link.is_cut = true;
            let delay = link.last_arrival.max(now) - now + 1;
            self.push(delay, Item::Broken(peer));
        }
    }

    /// Cuts a direction silently: the sides notice only by their keepalive, much later.
    pub(super) fn cut(&mut self, lost: &[Side]) {
        for side in lost {
            let drops = self.rng.percent(50);
            let link = &mut self.links[*side as usize];
            link.is_cut = true;
            link.generation += u32::from(drops);
        }
        for side in [Side::Primary, Side::Standby] {
            let delay = SECOND / 2 + self.rng.below(20 * SECOND);
            self.push(delay, Item::Broken(side));
        }
    }

    pub(super) fn reset(&mut self) {
        for side in [Side::Primary, Side::Standby] {
            let link = &mut self.links[side as usize];
            link.is_cut = true;
            link.generation += 1;
            let delay = self.rng.below(2_000);
            self.push(delay, Item::Broken(side));
        }
    }

    pub(super) fn broken(&mut self, side: Side) {
        match side {
            Side::Primary if self.primary.is_open => {
                self.primary_feeds(crate::replica::primary::Event::ConnectionLost);
            }
            Side::Standby if self.standby.is_open => {
                self.standby_feeds(crate::replica::standby::Event::ConnectionLost);
            }
            _ => {}
        }
    }
}
