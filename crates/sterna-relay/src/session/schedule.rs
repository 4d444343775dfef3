//! Which frame a carrier sends next.

use std::time::Duration;

use super::carriers::{CarrierId, Ping};
use super::flow::{Flow, Open};
use super::outgoing::{Chunk, End, Priority};
use super::outgoing_frame::OutgoingFrame;
use super::settings::has_bug;
use super::{Event, Role, Session};
use crate::frame::{DATA_BYTES, Frame, HAVE_HASHES};

/// Bytes that are packed as one frame: with several carriers, and with one, where frames of priority wait for it.
const PACKED_AT_ONCE: usize = 128 << 10;
const PACKED_BETWEEN: usize = 64 << 10;

impl Session {
    /// A new carrier of this number has finished its greeting. An older carrier of the same number is closed.
    pub fn carrier_up(&mut self, lane: u8, now: Duration) -> CarrierId {
        let (id, older) = self.carriers.add(lane, self.flows.keys().copied().collect(), now);
        if let Some(older) = older {
            self.events.push(Event::Close(older));
            self.carrier_down(older, now);
        }
        self.events.push(Event::Send);
        id
    }

    /// A carrier is lost. Its flows continue on another one, at the acknowledged offsets.
    pub fn carrier_down(&mut self, id: CarrierId, now: Duration) {
        if !self.carriers.remove(id) {
            return;
        }
        self.counters.lost_carriers += 1;
        if self.carriers.len() == 0 {
            self.rate.interrupted(now);
        }
        // The last acknowledgements of forgotten flows may have been lost with it.
        let again: Vec<_> = self.parted.iter().filter(|late| !self.late.contains(late)).copied().collect();
        self.late.extend(again);
        let skips = (has_bug!(self.settings, ContinuesAfterLoss), has_bug!(self.settings, ForgetsEnd));
        for flow in self.flows.values_mut() {
            if flow.outgoing.carrier == Some(id) {
                flow.outgoing.rewind(skips);
                if flow.open == Open::Sent && !has_bug!(self.settings, ForgetsOpen) {
                    flow.open = Open::Due;
                }
            } else if !skips.1 {
                // The peer may have forgotten the flow, and its last acknowledgement may have been lost with this carrier.
                flow.outgoing.repeat_end();
            }
            // An ACK, a MISS or a STOP may have been lost with it.
            flow.incoming.is_ack_due = true;
            if !has_bug!(self.settings, ForgetsMiss) {
                flow.incoming.lost(id);
            }
            flow.incoming.is_stop_due |= flow.incoming.stop.is_some() && !flow.incoming.is_stop_acknowledged;
        }
        self.events.push(Event::Send);
    }

    /// Number of carriers that exist.
    pub fn carriers(&self) -> usize {
        self.carriers.len()
    }

    /// Whether the peer has ever sent SYNC: it knows the session.
    pub fn was_connected(&self) -> bool {
        self.has_synced
    }

    /// The next frame for this carrier; `None` if there is nothing to send now. The frame counts as sent.
    pub fn next_frame(&mut self, id: CarrierId, now: Duration) -> Option<OutgoingFrame> {
        self.next_frame_of(id, now, Priority::Bulk)
    }

    /// As [`next_frame`](Self::next_frame), for flows of at least this priority.
    pub fn next_frame_of(&mut self, id: CarrierId, now: Duration, least: Priority) -> Option<OutgoingFrame> {
        if let Some(greeting) = self.next_greeting(id, now) {
            return greeting;
        }
        if self.acknowledging_carrier() == Some(id)
            && let Some(frame) = self.next_acknowledgement()
        {
            return Some(frame.into());
        }
        if !self.carriers.ready().any(|ready| ready == id) {
            return None;
        }
        self.next_of_flows(id, now, least).or_else(|| self.next_announcement(id))
    }

    /// Whether [`next_frame`](Self::next_frame) has a frame for this carrier.
    pub fn has_frame(&self, id: CarrierId, now: Duration) -> bool {
        let Some(carrier) = self.carriers.find(id) else { return false };
        if self.over.is_some() {
            return !carrier.is_over_sent;
        }
        if !carrier.is_sync_sent || !carrier.pongs.is_empty() || matches!(carrier.ping, Ping::Due(_)) {
            return true;
        }
        if !carrier.is_ready() {
            return false;
        }
        let acknowledges = self.acknowledging_carrier() == Some(id);
        let announces = self.carriers.ready().next_back() == Some(id) && !self.announcements.is_empty();
        if announces || (acknowledges && !self.late.is_empty()) {
            return true;
        }
        let packs = self.packs && self.role == Role::Dialer;
        self.flows.iter().any(|(number, flow)| {
            let answers = acknowledges && flow.is_known() && flow.incoming.has_answer();
            answers || (flow.has_work(packs, now) && self.carrier_of(*number, flow) == Some(id))
        })
    }

    /// The carrier on which this flow sends now.
    pub fn carrier_for(&self, number: u32) -> Option<CarrierId> {
        let flow = self.flows.get(&number)?;
        self.carrier_of(number, flow).filter(|id| self.carriers.ready().any(|ready| ready == *id))
    }

    /// The carrier on which this side acknowledges.
    pub fn acknowledging_carrier(&self) -> Option<CarrierId> {
        self.carriers.ready().next()
    }

    /// The next acknowledgement for this carrier. It counts as sent.
    pub fn next_acknowledgement_of(&mut self, id: CarrierId) -> Option<Frame> {
        if self.is_over() || self.acknowledging_carrier() != Some(id) {
            return None;
        }
        self.next_acknowledgement()
    }

    /// The peer may get PACKED frames, or this side may get them.
    pub fn agree(&mut self) {
        self.packs = true;
    }

    /// Announces pages that this side has. Announcements may be lost with a carrier.
    pub fn announce(&mut self, stay: bool, hashes: &[u64]) {
        let frames = hashes.chunks(HAVE_HASHES).map(|hashes| Frame::Have { stay, hashes: hashes.to_vec() });
        self.announcements.extend(frames);
        self.events.push(Event::Send);
    }

    /// Whether bytes wait for the rest of their page, and [`next_frame`](Self::next_frame) has to be called again soon.
    pub fn holds(&self, now: Duration) -> bool {
        let holds = |flow: &Flow| flow.outgoing.priority == Priority::Bulk && flow.outgoing.holds(now);
        self.packs && self.flows.values().any(holds)
    }

    /// What this side has is told after everything else, and not where answers are sent.
    fn next_announcement(&mut self, id: CarrierId) -> Option<OutgoingFrame> {
        let is_last = self.carriers.ready().next_back() == Some(id);
        is_last.then(|| self.announcements.pop_front()).flatten().map(Into::into)
    }

    /// What a carrier sends before flows: OVER, greetings, PONG and PING. The inner `None`: nothing may follow.
    fn next_greeting(&mut self, id: CarrierId, now: Duration) -> Option<Option<OutgoingFrame>> {
        let over = self.over.clone();
        let Some(carrier) = self.carriers.get(id) else { return Some(None) };
        if let Some((verdict, text)) = over {
            let is_first = !std::mem::replace(&mut carrier.is_over_sent, true);
            return Some(is_first.then(|| Frame::Over { verdict, text }.into()));
        }
        if !carrier.is_sync_sent {
            while let Some(number) = carrier.greetings.pop_front() {
                // A flow whose OPEN is on the way has nothing to acknowledge.
                let flow = self.flows.get_mut(&number).filter(|flow| flow.is_known());
                if let Some(flow) = flow {
                    return Some(Some(acknowledgement(number, flow).into()));
                }
            }
            carrier.is_sync_sent = true;
            self.events.push(Event::Send);
            return Some(Some(Frame::Sync.into()));
        }
        if let Some(value) = carrier.pongs.pop_front() {
            return Some(Some(Frame::Pong(value).into()));
        }
        if let Ping::Due(_) = carrier.ping {
            let value = now.as_micros() as u64;
            carrier.ping = Ping::Sent(now, value);
            return Some(Some(Frame::Ping(value).into()));
        }
        None
    }

    fn next_acknowledgement(&mut self) -> Option<Frame> {
        if let Some((flow, received, has_end, has_stop)) = self.late.pop() {
            return Some(Frame::Ack {
                flow,
                received,
                delivered: received,
                credit: received,
                has_end,
                has_stop,
            });
        }
        for (number, flow) in &mut self.flows {
            // The frame must not overtake OPEN on another carrier.
            if !flow.is_known() {
                continue;
            }
            if std::mem::take(&mut flow.incoming.is_stop_due)
                && let Some(reason) = flow.incoming.stop
            {
                return Some(Frame::Stop { flow: *number, reason });
            }
            if std::mem::take(&mut flow.incoming.is_miss_due) {
                return Some(Frame::Miss { flow: *number, offset: flow.incoming.received });
            }
            if flow.incoming.is_ack_due {
                return Some(acknowledgement(*number, flow));
            }
        }
        None
    }

    fn next_of_flows(&mut self, id: CarrierId, now: Duration, least: Priority) -> Option<OutgoingFrame> {
        let urgent = self.pick(id, Priority::Urgent, now);
        let bulk = |session: &mut Self| {
            if least == Priority::Bulk { session.pick(id, Priority::Bulk, now) } else { None }
        };
        let number = urgent.or_else(|| bulk(self))?;
        let flow = self.flows.get_mut(&number)?;
        flow.outgoing.carrier = Some(id);
        if flow.open == Open::Due {
            (flow.open, flow.was_opened) = (Open::Sent, true);
            // The credit is granted from now on.
            return Some(Frame::Open { flow: number, credit: flow.incoming.credit() }.into());
        }
        let packs = self.packs && self.role == Role::Dialer && flow.outgoing.priority == Priority::Bulk;
        let most = if self.carriers.len() > 1 { PACKED_AT_ONCE } else { PACKED_BETWEEN };
        let chunk = match packs {
            true => flow.outgoing.next_whole(most, now),
            false => flow.outgoing.next_piece(DATA_BYTES),
        };
        if let Some(Chunk { offset, bytes, again, packing }) = chunk {
            self.counters.resent += again;
            self.counters.sent += bytes.len() as u64;
            let frame = Frame::Data { flow: number, offset, length: bytes.len() };
            return Some(OutgoingFrame { frame, payload: Some(bytes), packing });
        }
        let end = flow.outgoing.end?;
        flow.outgoing.end_is_sent();
        let offset = flow.outgoing.taken;
        Some(match end {
            End::Finish => Frame::Finish { flow: number, offset }.into(),
            End::Reset(reason) => Frame::Reset { flow: number, offset, reason }.into(),
        })
    }

    /// A flow that has a frame for this carrier. Flows take turns.
    fn pick(&mut self, id: CarrierId, priority: Priority, now: Duration) -> Option<u32> {
        let (after, packs) = (self.turn, self.packs && self.role == Role::Dialer);
        let wanted = |(number, flow): (&u32, &Flow)| {
            let fits = flow.outgoing.priority == priority && flow.has_work(packs, now);
            (fits && self.carrier_of(*number, flow) == Some(id)).then_some(*number)
        };
        let found = self
            .flows
            .range(after.saturating_add(1)..)
            .find_map(wanted)
            .or_else(|| self.flows.range(..=after).find_map(wanted))?;
        self.turn = found;
        Some(found)
    }

    /// The carrier on which this direction sends now.
    pub(super) fn carrier_of(&self, number: u32, flow: &Flow) -> Option<CarrierId> {
        let bound = flow.outgoing.carrier.filter(|_| flow.is_bound());
        if let Some(bound) = bound
            && !has_bug!(self.settings, ChangesCarrierAtOnce)
        {
            return Some(bound);
        }
        let ready: Vec<CarrierId> = self.carriers.ready().collect();
        match (ready.as_slice(), flow.outgoing.priority) {
            ([first, ..], Priority::Urgent) | ([first], _) => Some(*first),
            ([_, rest @ ..], _) => rest.get(number as usize % rest.len().max(1)).copied(),
            ([], _) => None,
        }
    }
}

fn acknowledgement(number: u32, flow: &mut Flow) -> Frame {
    let incoming = &mut flow.incoming;
    incoming.is_ack_due = false;
    Frame::Ack {
        flow: number,
        received: incoming.received,
        delivered: incoming.delivered,
        credit: incoming.credit(),
        has_end: incoming.end.is_some(),
        has_stop: incoming.has_stop_received,
    }
}
