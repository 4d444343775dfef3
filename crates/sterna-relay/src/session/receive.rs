//! What a received frame changes.

use std::time::Duration;

use super::carriers::{CarrierId, Ping};
use super::error::SessionError;
use super::flow::{Flow, Open};
use super::outgoing::{End, Priority};
use super::piece::Piece;
use super::settings::{LARGEST_WINDOW, MOST_FLOWS, has_bug};
use super::{Event, Role, Session};
use crate::frame::{Frame, FrameError, Kind, ResetReason, Rule};

/// Acknowledgements for forgotten flows that wait; the peer sends its end again if one is dropped.
const MOST_LATE: usize = 64;

impl Session {
    /// Takes a frame that arrived on this carrier. `payload` has the bytes of DATA.
    ///
    /// # Errors
    /// The frame breaks a rule. The session must end.
    pub fn receive(
        &mut self,
        id: CarrierId,
        frame: Frame,
        payload: Option<Piece>,
        now: Duration,
    ) -> Result<(), SessionError> {
        let (session, lane) = (self.id, self.carriers.lane(id));
        self.take_frame(id, frame, payload, now).map_err(|source| SessionError { session, lane, source })
    }

    fn take_frame(
        &mut self,
        id: CarrierId,
        frame: Frame,
        payload: Option<Piece>,
        now: Duration,
    ) -> Result<(), FrameError> {
        let bad = |rule| FrameError::new(frame.kind().name(), frame.flow(), 0, rule);
        if self.peer_over.is_some() && !matches!(frame, Frame::Over { .. }) {
            return Err(bad(Rule::AfterOver));
        }
        // A carrier that was given up may have frames that were read before.
        let Some(carrier) = self.carriers.get(id) else { return Ok(()) };
        carrier.read_at = now;
        if let Ping::Due(_) = carrier.ping {
            carrier.ping = Ping::None;
        }
        let is_early = matches!(frame, Frame::Ack { .. } | Frame::Sync | Frame::Over { .. });
        if !carrier.is_sync_received && !is_early {
            return Err(bad(Rule::BeforeSync));
        }
        match frame {
            Frame::Sync if carrier.is_sync_received => return Err(bad(Rule::SyncTwice)),
            Frame::Sync => {
                carrier.is_sync_received = true;
                self.has_synced = true;
                self.events.push(Event::Send);
            }
            Frame::Ping(value) => {
                carrier.asked(value);
                self.events.push(Event::Send);
            }
            Frame::Pong(value) => match carrier.ping {
                Ping::Sent(at, asked) if asked == value => {
                    carrier.ping = Ping::None;
                    self.rate.round_trip(now, now.saturating_sub(at));
                }
                _ => return Err(bad(Rule::Pong(value))),
            },
            Frame::Over { verdict, text } => {
                if self.peer_over.is_none() {
                    self.peer_over = Some((verdict, text.clone()));
                    self.events.push(Event::Over(verdict, text));
                }
            }
            Frame::Open { flow, credit } => self.opened(id, flow, credit, now)?,
            Frame::Ack { flow, received, delivered, credit, has_end, has_stop } => {
                self.acknowledged(flow, (received, delivered, credit), (has_end, has_stop), now)?;
            }
            Frame::Data { flow, offset, .. } => self.data(id, flow, offset, payload)?,
            Frame::Finish { flow, offset } => self.ended(id, flow, End::Finish, offset)?,
            Frame::Reset { flow, offset, reason } => self.ended(id, flow, End::Reset(reason), offset)?,
            Frame::Stop { flow, reason } => self.stopped(flow, reason)?,
            // The caller unpacks PACKED where it is agreed.
            Frame::Packed { .. } => return Err(bad(Rule::NotAgreed)),
            Frame::Miss { .. } | Frame::Have { .. } if !self.packs || self.role == Role::Acceptor => {
                return Err(bad(Rule::NotAgreed));
            }
            Frame::Miss { flow, offset } => self.missed(flow, offset)?,
            // The caller notes the pages.
            Frame::Have { .. } => {}
        }
        Ok(())
    }

    /// Bytes of a flow came on this carrier with a reference to a page that is not here. The peer sends them again.
    ///
    /// # Errors
    /// The frame breaks a rule. The session must end.
    pub fn missing(
        &mut self,
        id: CarrierId,
        number: u32,
        offset: u64,
        length: usize,
        now: Duration,
    ) -> Result<(), SessionError> {
        let (session, lane) = (self.id, self.carriers.lane(id));
        let Some(carrier) = self.carriers.get(id) else { return Ok(()) };
        carrier.read_at = now;
        if !carrier.is_sync_received {
            let source = FrameError::new(Kind::Packed.name(), number, 0, Rule::BeforeSync);
            return Err(SessionError { session, lane, source });
        }
        self.counters.misses += 1;
        self.events.push(Event::Send);
        let result = self.known(number, Kind::Packed).and_then(|flow| match flow {
            Some(flow) => flow.incoming.missing(number, id, (offset, offset + length as u64)),
            None => Ok(()),
        });
        result.map_err(|source| SessionError { session, lane, source })
    }

    /// The peer lacks a page.
    fn missed(&mut self, number: u32, offset: u64) -> Result<(), FrameError> {
        let Some(flow) = self.known(number, Kind::Miss)? else { return Ok(()) };
        let sent = flow.outgoing.sent;
        if offset > sent && !flow.outgoing.is_stopped {
            return Err(FrameError::new(Kind::Miss.name(), number, 8, Rule::NeverSentMiss { offset, sent }));
        }
        flow.outgoing.rewind_to(offset);
        self.counters.misses += 1;
        self.events.push(Event::Send);
        Ok(())
    }

    fn opened(&mut self, id: CarrierId, number: u32, credit: u64, now: Duration) -> Result<(), FrameError> {
        let bad = |rule| FrameError::new(Kind::Open.name(), number, 0, rule);
        if self.role == Role::Dialer {
            return Err(bad(Rule::Opener));
        }
        if let Some(flow) = self.flows.get_mut(&number) {
            if flow.open == Open::By(id) {
                return Err(bad(Rule::FlowTwice));
            }
            flow.open = Open::By(id);
            flow.incoming.is_ack_due = true;
            self.events.push(Event::Send);
            return Ok(());
        }
        if self.is_forgotten(number) {
            return Ok(());
        }
        let ahead = (number - self.opened_through) as usize;
        if self.flows.len() >= MOST_FLOWS || ahead > MOST_FLOWS {
            return Err(bad(Rule::TooManyFlows(MOST_FLOWS)));
        }
        if credit > LARGEST_WINDOW {
            return Err(bad(Rule::Credit { credit, delivered: 0, most: LARGEST_WINDOW }));
        }
        let mut flow = Flow::new(Open::By(id), now);
        flow.outgoing.credit = credit;
        // The acceptor's direction answers: return path, acknowledgements of servers.
        flow.outgoing.priority = Priority::Urgent;
        flow.incoming.is_ack_due = true;
        self.flows.insert(number, flow);
        self.counters.flows += 1;
        // A flow whose predecessor is on the way waits: the VMM counts on the order.
        while self.flows.contains_key(&(self.opened_through + 1)) {
            self.opened_through += 1;
            self.events.push(Event::Connect(self.opened_through));
        }
        self.events.push(Event::Send);
        Ok(())
    }

    fn data(
        &mut self,
        id: CarrierId,
        number: u32,
        offset: u64,
        payload: Option<Piece>,
    ) -> Result<(), FrameError> {
        let twice = has_bug!(self.settings, DeliversTwice);
        let Some(piece) = payload else {
            return Err(FrameError::new(Kind::Data.name(), number, 8, Rule::Payload(0)));
        };
        let Some(flow) = self.known(number, Kind::Data)? else { return Ok(()) };
        flow.incoming.data(number, id, offset, piece, twice)?;
        self.events.extend([Event::Deliver(number), Event::Send]);
        Ok(())
    }

    fn ended(&mut self, id: CarrierId, number: u32, end: End, offset: u64) -> Result<(), FrameError> {
        let kind = if end == End::Finish { Kind::Finish } else { Kind::Reset };
        let Some(flow) = self.known(number, kind)? else {
            self.acknowledge_late(number, offset, true, false);
            return Ok(());
        };
        flow.incoming.take_end(number, id, end, offset)?;
        self.events.extend([Event::Deliver(number), Event::Send]);
        self.forget_if_over(number);
        Ok(())
    }

    fn stopped(&mut self, number: u32, reason: ResetReason) -> Result<(), FrameError> {
        let Some(flow) = self.known(number, Kind::Stop)? else {
            self.acknowledge_late(number, 0, false, true);
            return Ok(());
        };
        flow.incoming.has_stop_received = true;
        flow.incoming.is_ack_due = true;
        self.stored -= flow.outgoing.stop(reason);
        self.events.extend([Event::Stopped(number), Event::Send, Event::Room]);
        Ok(())
    }

    fn acknowledged(
        &mut self,
        number: u32,
        (received, delivered, credit): (u64, u64, u64),
        (has_end, has_stop): (bool, bool),
        now: Duration,
    ) -> Result<(), FrameError> {
        let bad = |at, rule| FrameError::new(Kind::Ack.name(), number, at, rule);
        let Some(flow) = self.known(number, Kind::Ack)? else { return Ok(()) };
        // An OPEN that would be sent again is not needed any more.
        if !matches!(flow.open, Open::By(_)) {
            flow.open = Open::Known;
        }
        let outgoing = &mut flow.outgoing;
        if received > outgoing.sent && !outgoing.is_stopped {
            return Err(bad(8, Rule::NeverSent { acknowledged: received, sent: outgoing.sent }));
        }
        if delivered > received {
            return Err(bad(16, Rule::Delivered { delivered, received }));
        }
        if credit > delivered + LARGEST_WINDOW {
            return Err(bad(24, Rule::Credit { credit, delivered, most: LARGEST_WINDOW }));
        }
        if has_end && !outgoing.has_stated_end() {
            return Err(bad(32, Rule::EndNeverSent));
        }
        if has_stop && flow.incoming.stop.is_none() {
            return Err(bad(32, Rule::EndNeverSent));
        }
        outgoing.credit = outgoing.credit.max(credit);
        let freed = if outgoing.is_stopped { 0 } else { outgoing.acknowledge(received) };
        outgoing.end_acknowledged |= has_end;
        let progress = delivered.saturating_sub(outgoing.delivered);
        let is_bulk = outgoing.priority == Priority::Bulk;
        let stamps = outgoing.note_delivered(delivered, now);
        flow.incoming.is_stop_acknowledged |= has_stop;
        if is_bulk && progress > 0 {
            self.rate.delivered(now, progress);
        }
        stamps.into_iter().for_each(|stamp| self.rate.sample(now, stamp));
        self.stored -= freed;
        self.events.extend([Event::Room, Event::Send]);
        self.forget_if_over(number);
        Ok(())
    }

    /// The flow of a frame; `None` if it is forgotten.
    fn known(&mut self, number: u32, kind: Kind) -> Result<Option<&mut Flow>, FrameError> {
        if self.is_forgotten(number) {
            return Ok(None);
        }
        let flow = self.flows.get_mut(&number).filter(|flow| flow.may_be_known());
        flow.map(Some).ok_or_else(|| FrameError::new(kind.name(), number, 4, Rule::UnknownFlow))
    }

    fn acknowledge_late(&mut self, number: u32, length: u64, has_end: bool, has_stop: bool) {
        if self.late.len() < MOST_LATE {
            self.late.push((number, length, has_end, has_stop));
            self.events.push(Event::Send);
        }
    }
}
