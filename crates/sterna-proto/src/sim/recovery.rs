//! Recovery in postcopy: dials that are late, arrive twice, or reach no process.

use super::planted::Planted;
use super::schedule::{Effect, Pairing};
use super::world::{Item, Message, Side, World};
use crate::destination::{self, Destination};
use crate::source::{Event, State};

/// Value of SHUT that reports an operator's pause at the destination.
const PAUSED: u32 = 2;
/// The set of all pages, as bits.
pub(super) const ALL: u8 = 0b1111;
/// Interval, in microseconds, at which a waiting source is checked again.
const LOOK: u64 = 1_000;

impl World<'_> {
    /// Performs [`Action::Recover`](crate::source::Action::Recover) of the source.
    pub(super) fn source_dials(&mut self) {
        if self.facts.told_to_wait {
            self.violate("invariant 4: the source connects again, and was told to wait for its operator");
        }
        // Sessions of precopy and of recovery share one sequence of numbers, so that an old
        // connection of either kind is refused.
        self.dials.last += 1;
        let session = self.dials.last;
        self.facts.session = session;
        let delay = self.network_delay();
        let is_blocked = self.now < self.asks_blocked_until || self.rng.percent(10);
        self.push(delay, if is_blocked { Item::NotConnected(session) } else { Item::RecoveryDial(session) });
    }

    /// Handles a recovery's dial that reaches the destination's address.
    pub(super) fn recovery_dialled(&mut self, session: u32) {
        let is_stale = session <= self.facts.newest.max(self.dials.taken())
            && self.schedule.planted != Some(Planted::AcceptStaleSession);
        if is_stale || !self.lacks_pages() || self.schedule.pairing != Pairing::Sternas {
            return self.refuse(session);
        }
        if session < self.facts.newest {
            self.violate("invariant 4: a session was let in behind a newer one");
        }
        self.facts.newest = session;
        if self.destination_state() != Some(destination::State::PostcopyPaused) {
            self.destination_event(destination::Event::Superseded);
        }
        self.waits(session);
    }

    pub(super) fn waits(&mut self, session: u32) {
        if session != self.facts.newest || !self.lacks_pages() {
            return self.refuse(session);
        }
        if !self.destination.machine.as_ref().is_some_and(Destination::may_recover) {
            return self.push(LOOK, Item::Waits(session));
        }
        for side in [Side::Source, Side::Destination] {
            let link = self.link_to(side);
            (link.cut, link.generation) = (false, link.generation + 1);
        }
        self.dials.taken = session;
        self.destination.open = true;
        self.destination_event(destination::Event::RecoveryBegun);
        let delay = self.network_delay();
        self.push(delay, Item::Connected(session));
    }

    fn lacks_pages(&self) -> bool {
        self.destination.alive && self.destination.machine.as_ref().is_some_and(Destination::lacks_pages)
    }

    fn refuse(&mut self, session: u32) {
        let delay = self.network_delay();
        self.push(delay, Item::NotConnected(session));
    }

    /// Handles the destination's acceptance at the source.
    pub(super) fn connected(&mut self, session: u32) {
        if session != self.facts.session || self.source_state() != Some(State::PostcopyRecover) {
            // The source has given this attempt up. The destination notices that, unless a newer
            // attempt has arrived.
            if session == self.facts.newest {
                self.push(LOOK, Item::Broken(Side::Destination, session));
            }
            return;
        }
        self.source.open = true;
        self.send(Side::Destination, Message::AskBitmap);
    }

    pub(super) fn not_connected(&mut self, session: u32) {
        if session == self.facts.session && self.source_state() == Some(State::PostcopyRecover) {
            self.source_event(Event::ConnectionLost);
        }
    }

    /// Sends the destination's set of placed pages.
    pub(super) fn says_bitmap(&mut self) {
        if self.destination_state() != Some(destination::State::PostcopyRecover) {
            return self.destination_event(destination::Event::PeerMisbehaved);
        }
        self.facts.page_lost = false;
        let bits = match self.schedule.planted {
            // The planted bug forgets page 0 although it is in place.
            Some(Planted::ForgetPlacedPage) => self.facts.placed & !1,
            _ => self.facts.placed,
        };
        self.send(Side::Source, Message::Bitmap(bits));
    }

    pub(super) fn hears_bitmap(&mut self, bits: u8) {
        if self.source_state() != Some(State::PostcopyRecover) {
            return self.source_event(Event::PeerMisbehaved);
        }
        if self.schedule.planted != Some(Planted::DropLostPages) {
            self.facts.sent = bits;
        }
        self.send(Side::Destination, Message::Resume);
    }

    /// Sends pages for which the destination's guest, or its start, waits.
    pub(super) fn sends_requested(&mut self, pages: u8) {
        let serves = matches!(self.source_state(), Some(State::AwaitingAck | State::Postcopy));
        let unsent = pages & !self.facts.sent;
        if serves && unsent != 0 {
            self.facts.sent |= unsent;
            (0..4).map(|bit| unsent & (1 << bit)).filter(|page| *page != 0).for_each(|page| {
                self.send(Side::Destination, Message::Page(page));
            });
        }
    }

    /// Handles a page that arrives at the destination.
    pub(super) fn places(&mut self, page: u8) {
        use destination::State as D;
        // Lanes that were stopped place no pages.
        if matches!(self.destination_state(), Some(D::Committed | D::Postcopy)) {
            if self.fails(Effect::Place) {
                return self.cannot_place();
            }
            if self.facts.placed & page != 0 {
                self.violate("invariant 2: a page was placed over what the guest has written");
            }
            self.facts.placed |= page;
        }
    }

    /// Loses a page. Either the destination notices immediately, or the page had a channel of its
    /// own and is missing at the end.
    fn cannot_place(&mut self) {
        if self.rng.percent(50) {
            return self.destination_event(destination::Event::LocalFailure);
        }
        self.facts.page_lost = true;
    }

    /// Handles the end of the lost channels: no page of theirs is placed any more.
    pub(super) fn channels_are_closed(&mut self) {
        self.forward.generation += u32::from(!self.destination.open);
        let waits = self.destination_state() == Some(destination::State::PostcopyPaused);
        if waits && self.facts.placed == ALL {
            self.facts.pages_complete = true;
            self.coverage.whole_without_end += 1;
            self.destination_event(destination::Event::PagesComplete);
        }
        self.destination_event(destination::Event::ChannelsClosed);
    }

    /// Plays the source's operator, who breaks the connection on purpose.
    pub(super) fn source_pauses(&mut self) {
        let may = matches!(self.source_state(), Some(State::Postcopy | State::PostcopyRecover));
        self.source_event(Event::PauseRequested);
        if may && self.source.alive {
            self.facts.told_to_wait = true;
            if self.source_state() != Some(State::PostcopyPaused) {
                self.violate("invariant 4: the source was told to pause and continues");
            }
        }
    }

    /// Plays the destination's operator, who breaks the connection on purpose. The source may be
    /// informed.
    pub(super) fn destination_pauses(&mut self) {
        use destination::State as D;
        let starts = self.destination.machine.as_ref().is_some_and(Destination::starts_in_postcopy);
        let may = match self.destination_state() {
            Some(D::Postcopy | D::PostcopyRecover) => true,
            state => starts && state == Some(D::Committed),
        };
        self.facts.last_word |= may && self.destination.alive;
        if self.destination_state().is_some() {
            self.destination_event(destination::Event::PauseRequested);
        }
    }

    /// Sends the SHUT that precedes an intended end of the connection.
    pub(super) fn says_last_word(&mut self) {
        if self.facts.last_word {
            // This SHUT declares that this side has the guest, even while the guest is being
            // started.
            self.facts.taken_over = true;
            self.send(Side::Source, Message::Shut(PAUSED));
        }
    }

    /// Handles SHUT at the source.
    pub(super) fn hears_shut(&mut self, code: u32) {
        use State as S;
        let waits = matches!(self.source_state(), Some(S::Postcopy | S::PostcopyPaused | S::PostcopyRecover));
        self.facts.told_to_wait |= waits && code == PAUSED;
        self.source_event(Event::Shut(code));
    }
}
