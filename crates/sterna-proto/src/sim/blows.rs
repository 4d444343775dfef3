//! Faults that the simulator injects: cuts, crashes, an operator's commands, local failures.

use super::schedule::{Blow, Place};
use super::world::{Command, Item, Message, Owner, SECOND, Side, World};

impl World<'_> {
    pub(super) fn strikes(&mut self, blow: Blow) {
        if let Some(machine) = self.source.machine.as_ref().filter(|_| self.source.alive) {
            let place = Place::Source(machine.state());
            self.coverage.strike(place, blow);
        }
        let destination = &self.destination;
        if let Some(machine) = destination.machine.as_ref().filter(|_| destination.alive) {
            let place = Place::Destination(machine.state());
            self.coverage.strike(place, blow);
        }
        match blow {
            Blow::CutForward => self.cut(&[Side::Destination]),
            Blow::CutBack => self.cut(&[Side::Source]),
            Blow::CutBoth => self.cut(&[Side::Destination, Side::Source]),
            Blow::Reset => self.reset(),
            Blow::CutAsks => self.block_asks(),
            Blow::CrashSource => self.crash(Side::Source),
            Blow::CrashDestination => self.crash(Side::Destination),
            Blow::RestartDestination => {
                self.crash(Side::Destination);
                self.facts.restarted = true;
            }
            Blow::Cancel => self.cancel(),
            Blow::Abandon => self.operator(Command::Abandon),
            Blow::PauseSource => self.source_pauses(),
            Blow::PauseDestination => self.destination_pauses(),
            Blow::LocalSource => self.source_local_failure(),
            Blow::LocalDestination => self.destination_local_failure(),
            Blow::Garbage => self.send(Side::Source, Message::Garbage),
            Blow::ExtraAck => self.send(Side::Source, Message::Ack),
            Blow::Stray => {
                self.operator(Command::Continue);
                self.operator(Command::Retry);
            }
        }
    }

    /// Cuts a direction silently: the sides notice only by their stall limits, much later.
    fn cut(&mut self, lost: &[Side]) {
        for side in lost {
            let drops = self.rng.percent(50);
            let link = self.link_to(*side);
            link.cut = true;
            if drops {
                link.generation += 1;
            }
        }
        self.block_asks();
        for side in [Side::Source, Side::Destination] {
            let delay = SECOND / 2 + self.rng.below(20 * SECOND);
            let session = self.dials.taken();
            self.push(delay, Item::Broken(side, session));
        }
    }

    fn reset(&mut self) {
        for side in [Side::Source, Side::Destination] {
            let link = self.link_to(side);
            link.cut = true;
            link.generation += 1;
            let delay = self.rng.below(2_000);
            let session = self.dials.taken();
            self.push(delay, Item::Broken(side, session));
        }
    }

    /// Delivers every page, and breaks the connection before the end of the stream.
    pub(super) fn loses_end(&mut self) {
        let behind_the_last = self.forward.last_arrival.max(self.now) - self.now + 1;
        (self.forward.cut, self.back.cut) = (true, true);
        for side in [Side::Source, Side::Destination] {
            let session = self.dials.taken();
            self.push(behind_the_last, Item::Broken(side, session));
        }
    }

    fn block_asks(&mut self) {
        let until = self.now + self.rng.below(30 * SECOND);
        self.asks_blocked_until = self.asks_blocked_until.max(until);
    }

    pub(super) fn crash(&mut self, side: Side) {
        let (mine, peer) = match side {
            Side::Source => (Owner::Source, Side::Destination),
            Side::Destination => (Owner::Destination, Side::Source),
        };
        // The kernel releases the locks of a dead process.
        for hook in self.hooks.iter_mut().filter(|hook| **hook == mine) {
            *hook = Owner::Nobody;
        }
        match side {
            Side::Source => self.source.dies(),
            Side::Destination => self.destination.dies(),
        }
        // Data that the dead process had sent may still arrive, then the connection is reset. Data
        // under way to the dead process is lost with it.
        let now = self.now;
        let link = self.link_to(peer);
        if !link.cut {
            let delay = link.last_arrival.max(now) - now;
            link.cut = true;
            let session = self.dials.taken();
            self.push(delay + 1, Item::Broken(peer, session));
        }
    }
}
