//! The side of the carriers: connections that come and are lost, frames.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_transport::Channel;

use super::places::CarrierPlace;
use super::{Live, LiveStatus, Passing, State};
use crate::frame::{Frame, FrameError, Kind};
use crate::relay::options::Notice;
use crate::session::{CarrierId, OutgoingFrame, Piece, Priority, Role, SessionError};

/// Frames and bytes that one write of a carrier may have.
const BATCH_FRAMES: usize = 16;
const BATCH_BYTES: usize = 128 << 10;
/// How long a carrier waits for the rest of a page.
const HOLD: Duration = Duration::from_millis(1);

impl Live {
    /// A carrier has finished its greeting. `None`: its attempt is not newer than another one of its lane.
    pub(in crate::relay) fn attach(
        &self,
        lane: u8,
        attempt: u32,
        channel: &Arc<Channel>,
    ) -> Option<CarrierId> {
        let mut state = self.lock();
        let last = state.attempts.entry(lane).or_default();
        if attempt <= *last {
            return None;
        }
        let is_back = *last > 0;
        *last = attempt;
        state.meter.reconnections += u64::from(is_back);
        state.peer = Some(channel.peer().to_owned());
        let id = state.session.carrier_up(lane, self.now());
        state.carriers.insert(id, CarrierPlace::new(channel));
        if state.status == LiveStatus::Waiting && !state.session.is_over() {
            state.status = LiveStatus::Running;
        }
        if let Some((since, _)) = state.lost.take()
            && state.session.counters().lost_carriers > 0
        {
            self.options.notices.send(Notice::Back { session: self.id, after: since.elapsed() });
        } else if is_back {
            self.options.notices.send(Notice::CarrierBack { session: self.id, carrier: lane });
        }
        self.settle(&mut state);
        Some(id)
    }

    /// A carrier is lost.
    pub(in crate::relay) fn detach(&self, id: CarrierId, lane: u8, why: &str) {
        let mut state = self.lock();
        let was_there = state.close_carrier(id);
        state.session.carrier_down(id, self.now());
        let is_relaying = state.status == LiveStatus::Running && !state.session.is_over();
        if was_there && is_relaying && !state.carriers.is_empty() {
            let why = why.to_owned();
            self.options.notices.send(Notice::CarrierLost { session: self.id, carrier: lane, why });
        }
        if state.carriers.is_empty() && state.lost.is_none() {
            state.lost = Some((Instant::now(), why.to_owned()));
            if is_relaying {
                self.options.notices.send(Notice::Lost { session: self.id, why: why.to_owned() });
            }
        }
        self.settle(&mut state);
    }

    /// Waits for frames of this carrier, which its own thread writes. The frames of the call before are written. False: the
    /// carrier is closed.
    pub(in crate::relay) fn next_frames(&self, id: CarrierId, frames: &mut Vec<OutgoingFrame>) -> bool {
        let mut has_written = !frames.is_empty();
        frames.clear();
        let mut state = self.lock();
        loop {
            let Some(place) = state.carriers.get_mut(&id) else { return false };
            place.is_writing &= !std::mem::take(&mut has_written);
            let (is_busy, wake) = (place.is_writing, Arc::clone(&place.wake));
            let mut wait = None;
            if !is_busy {
                wait = self.wait_for_limit(&state, id);
                let least = if wait.is_some() { Priority::Urgent } else { Priority::Bulk };
                self.gather(&mut state, id, least, frames);
                self.begin_writing(&mut state, id, frames);
            }
            let has_changed = self.settle(&mut state);
            if !frames.is_empty() {
                return true;
            }
            // What this thread has settled may be work for it, and no other thread wakes it for that.
            if has_changed && !is_busy {
                continue;
            }
            let Some(place) = state.carriers.get_mut(&id) else { return false };
            place.is_waiting = true;
            let held = state.session.holds(self.now()).then_some(HOLD);
            match wait.into_iter().chain(held).min() {
                Some(wait) if !is_busy => {
                    wake.wait_for(&mut state, wait);
                }
                // The thread that writes now wakes this thread if there is more.
                _ => wake.wait(&mut state),
            }
            if let Some(place) = state.carriers.get_mut(&id) {
                place.is_waiting = false;
            }
        }
    }

    /// Takes the next frames of this carrier.
    pub(super) fn gather(
        &self,
        state: &mut State,
        id: CarrierId,
        least: Priority,
        frames: &mut Vec<OutgoingFrame>,
    ) {
        let mut bytes = 0;
        while frames.len() < BATCH_FRAMES && bytes < BATCH_BYTES {
            let Some(frame) = state.session.next_frame_of(id, self.now(), least) else { break };
            bytes += frame.payload.as_ref().map_or(0, |payload| payload.len());
            if let Frame::Data { flow, .. } = frame.frame {
                // Before the bytes leave: from now on they may arrive.
                let (sent, delivered) = state.session.progress(flow).unwrap_or_default();
                state.main.sent(flow, sent, delivered);
            }
            frames.push(frame);
        }
    }

    /// How long the limit of all sessions holds this carrier's pages up; `None`: it does not, or there are none.
    fn wait_for_limit(&self, state: &State, id: CarrierId) -> Option<Duration> {
        if self.options.limit.bytes_per_second() == 0 {
            return None;
        }
        if !state.session.has_bulk(id, self.now()) {
            self.share.rest();
            return None;
        }
        self.share.ask(Instant::now()).err()
    }

    /// Takes a frame of a carrier. Returns bytes that this thread has to write to a VMM.
    pub(in crate::relay) fn receive(
        &self,
        id: CarrierId,
        frame: Frame,
        payload: Option<Piece>,
    ) -> Result<Option<Passing>, SessionError> {
        let mut state = self.lock();
        let data = if let Frame::Data { flow, .. } = frame { Some(flow) } else { None };
        let acknowledged =
            if let Frame::Ack { flow, delivered, .. } = frame { Some((flow, delivered)) } else { None };
        let announced =
            if let Frame::Have { stay, hashes } = &frame { Some((*stay, hashes.clone())) } else { None };
        let is_miss = matches!(frame, Frame::Miss { .. });
        let mut result = state.session.receive(id, frame, payload, self.now());
        if let (Ok(()), Some(known)) = (&result, state.packing.known()) {
            if is_miss {
                known.lock().missed();
            }
            if let Some((stay, hashes)) = announced {
                result = known.lock().announced(stay, &hashes).map_err(|rule| {
                    let source = FrameError::new(Kind::Have.name(), 0, 12, rule);
                    SessionError { session: self.id, lane: 0, source }
                });
            }
        }
        if let Some((flow, delivered)) = acknowledged {
            let (sent, _) = state.session.progress(flow).unwrap_or_default();
            state.main.sent(flow, sent, delivered);
            if self.role == Role::Acceptor {
                state.main.answers_arrived(flow, Some(delivered));
            }
        }
        let passing = match (&result, data) {
            (Ok(()), Some(flow)) => self.pass_or_refuse(&mut state, flow),
            _ => None,
        };
        self.check(&mut state, &result);
        result.map(|()| passing)
    }

    fn pass_or_refuse(&self, state: &mut State, flow: u32) -> Option<Passing> {
        self.pass_directly(state, flow).unwrap_or_else(|refusal| {
            self.refuse(state, flow, refusal);
            None
        })
    }

    /// Bytes of a flow came with a reference to a page that is not here.
    pub(in crate::relay) fn missing(
        &self,
        id: CarrierId,
        flow: u32,
        offset: u64,
        length: usize,
    ) -> Result<(), SessionError> {
        let mut state = self.lock();
        let result = state.session.missing(id, flow, offset, length, self.now());
        self.check(&mut state, &result);
        result
    }

    /// A frame breaks a rule: the session ends, because a peer with proof does not follow the protocol.
    pub(in crate::relay) fn broken(&self, lane: u8, source: FrameError) -> SessionError {
        let error = SessionError { session: self.id, lane, source };
        self.check(&mut self.lock(), &Err(error.clone()));
        error
    }

    fn check(&self, state: &mut State, result: &Result<(), SessionError>) {
        if let Err(error) = result {
            let text = error.to_string();
            self.give_up(state, &text);
            let verdict = state.main.verdict();
            state.session.end(verdict, &text);
        }
        self.settle(state);
    }
}
