//! One direction of a flow at its receiver: the bytes that the VMM has not taken, and the credit.

use std::collections::VecDeque;

use super::carriers::CarrierId;
use super::outgoing::End;
use super::piece::Piece;
use super::settings::FIRST_WINDOW;
use crate::frame::{FrameError, Kind, ResetReason, Rule};

/// What the VMM's connection gets next.
#[derive(Debug, Clone)]
pub enum Delivery {
    /// Bytes. [`Session::delivered`](super::Session::delivered) reports how many the connection took.
    Bytes(Piece),
    /// The connection is closed for writing.
    Finish,
    /// The connection is broken off.
    Reset(ResetReason),
}

/// The receiver's state of one direction.
#[derive(Debug)]
pub(super) struct Incoming {
    pieces: VecDeque<Piece>,
    pub(super) received: u64,
    pub(super) delivered: u64,
    /// The window, in bytes, and the offset of `delivered` at which it grew the last time.
    window: u64,
    grew_at: u64,
    credit: u64,
    pub(super) end: Option<(End, u64)>,
    is_end_delivered: bool,
    /// This side cannot deliver further bytes.
    pub(super) stop: Option<ResetReason>,
    pub(super) is_stop_due: bool,
    pub(super) is_stop_acknowledged: bool,
    /// The peer has sent STOP for the other direction.
    pub(super) has_stop_received: bool,
    /// An ACK has to be sent.
    pub(super) is_ack_due: bool,
    /// A MISS has to be sent.
    pub(super) is_miss_due: bool,
    /// Carriers that brought a reference to a missing page. Until they bring the bytes again, later bytes are ignored.
    missed_on: Vec<CarrierId>,
    /// Offset up to which bytes were asked for without references.
    missed_to: u64,
}

impl Incoming {
    pub(super) fn new() -> Self {
        Self {
            pieces: VecDeque::new(),
            received: 0,
            delivered: 0,
            window: FIRST_WINDOW,
            grew_at: 0,
            credit: FIRST_WINDOW,
            end: None,
            is_end_delivered: false,
            stop: None,
            is_stop_due: false,
            is_stop_acknowledged: false,
            has_stop_received: false,
            is_ack_due: false,
            is_miss_due: false,
            missed_on: Vec::new(),
            missed_to: 0,
        }
    }

    /// Bytes that were received and not delivered.
    pub(super) fn waiting(&self) -> u64 {
        self.received - self.delivered
    }

    pub(super) fn credit(&self) -> u64 {
        self.credit
    }

    /// Takes the bytes at `offset`.
    pub(super) fn data(
        &mut self,
        flow: u32,
        carrier: CarrierId,
        offset: u64,
        piece: Piece,
        twice: bool,
    ) -> Result<(), FrameError> {
        let ends = offset + piece.len() as u64;
        if !self.is_next(Kind::Data, flow, carrier, (offset, ends))? {
            return Ok(());
        }
        self.missed_on.retain(|other| *other != carrier);
        self.is_miss_due &= !self.missed_on.is_empty();
        if twice && ends > self.received {
            self.received = ends;
            self.pieces.push_back(piece);
        } else if ends > self.received {
            let known = (self.received - offset) as usize;
            self.received = ends;
            self.pieces.push_back(piece.part(known, piece.len()));
        }
        Ok(())
    }

    /// Bytes from `offset` to `ends` came with a reference to a page that is not here.
    pub(super) fn missing(
        &mut self,
        flow: u32,
        carrier: CarrierId,
        (offset, ends): (u64, u64),
    ) -> Result<(), FrameError> {
        if !self.is_next(Kind::Packed, flow, carrier, (offset, ends))? || ends <= self.received {
            return Ok(());
        }
        if offset < self.missed_to {
            return Err(FrameError::new(Kind::Packed.name(), flow, 8, Rule::ReferenceAgain));
        }
        self.missed_to = ends;
        if !self.missed_on.contains(&carrier) {
            self.missed_on.push(carrier);
        }
        self.is_miss_due = true;
        Ok(())
    }

    /// Checks the place of bytes. False: they are ignored.
    fn is_next(
        &mut self,
        kind: Kind,
        flow: u32,
        carrier: CarrierId,
        (offset, ends): (u64, u64),
    ) -> Result<bool, FrameError> {
        let bad = |rule| FrameError::new(kind.name(), flow, 8, rule);
        if ends > self.credit {
            return Err(bad(Rule::BeyondCredit { ends, credit: self.credit }));
        }
        if let Some((_, end)) = self.end
            && ends > end
        {
            return Err(bad(Rule::End { offset: ends, end }));
        }
        self.is_ack_due = true;
        if self.stop.is_some() {
            self.skip_to(ends);
            return Ok(false);
        }
        if offset > self.received {
            let is_expected = self.missed_on.contains(&carrier);
            return if is_expected {
                Ok(false)
            } else {
                Err(bad(Rule::Gap { begins: offset, received: self.received }))
            };
        }
        Ok(true)
    }

    /// A carrier is lost. A MISS may have been lost with it.
    pub(super) fn lost(&mut self, carrier: CarrierId) {
        self.missed_on.retain(|other| *other != carrier);
        self.is_miss_due = !self.missed_on.is_empty();
    }

    /// Takes the end of the direction.
    pub(super) fn take_end(
        &mut self,
        flow: u32,
        carrier: CarrierId,
        end: End,
        offset: u64,
    ) -> Result<(), FrameError> {
        let name = match end {
            End::Finish => Kind::Finish.name(),
            End::Reset(_) => Kind::Reset.name(),
        };
        let bad = |rule| FrameError::new(name, flow, 8, rule);
        self.is_ack_due = true;
        if let Some(known) = self.end {
            let is_same = known == (end, offset);
            return if is_same { Ok(()) } else { Err(bad(Rule::End { offset, end: known.1 })) };
        }
        if offset < self.received {
            return Err(bad(Rule::End { offset, end: self.received }));
        }
        if offset > self.credit {
            return Err(bad(Rule::BeyondCredit { ends: offset, credit: self.credit }));
        }
        if self.stop.is_some() {
            self.skip_to(offset);
            self.is_end_delivered = true;
        } else if offset > self.received && self.missed_on.contains(&carrier) {
            return Ok(());
        } else if offset > self.received {
            return Err(bad(Rule::Gap { begins: offset, received: self.received }));
        }
        self.end = Some((end, offset));
        Ok(())
    }

    /// The next bytes or the end. The same until the caller reports that they are delivered.
    pub(super) fn next(&self) -> Option<Delivery> {
        if self.stop.is_some() {
            return None;
        }
        if let Some(piece) = self.pieces.front() {
            return Some(Delivery::Bytes(piece.clone()));
        }
        match self.end {
            Some((End::Finish, _)) if !self.is_end_delivered => Some(Delivery::Finish),
            Some((End::Reset(reason), _)) if !self.is_end_delivered => Some(Delivery::Reset(reason)),
            _ => None,
        }
    }

    /// The VMM's connection has taken `bytes` bytes of what [`next`](Self::next) returned.
    pub(super) fn delivered(&mut self, bytes: u64) {
        let mut left = bytes.min(self.waiting());
        self.delivered += left;
        while left > 0 {
            let Some(first) = self.pieces.front_mut() else { break };
            if first.len() as u64 > left {
                *first = first.part(left as usize, first.len());
                break;
            }
            left -= first.len() as u64;
            self.pieces.pop_front();
        }
        self.is_ack_due = true;
    }

    pub(super) fn end_delivered(&mut self) {
        self.is_end_delivered = true;
    }

    /// Whether a STOP, a MISS or an ACK has to be sent.
    pub(super) fn has_answer(&self) -> bool {
        self.is_ack_due || self.is_miss_due || (self.is_stop_due && self.stop.is_some())
    }

    /// Whether nothing more comes and nothing is left to deliver.
    pub(super) fn is_over(&self) -> bool {
        self.end.is_some() && self.is_end_delivered
    }

    /// Gives up delivering.
    pub(super) fn stop(&mut self, reason: ResetReason) -> bool {
        if self.stop.is_some() {
            return false;
        }
        self.stop = Some(reason);
        self.pieces.clear();
        self.delivered = self.received;
        self.is_end_delivered |= self.end.is_some();
        self.is_stop_due = self.end.is_none();
        self.is_ack_due = true;
        self.credit = self.credit.max(self.delivered);
        true
    }

    /// Grants more credit. The window grows by at most `spare` bytes, to at most `most`. Returns the growth.
    pub(super) fn grant(&mut self, spare: u64, most: u64) -> u64 {
        let mut growth = 0;
        // A window that was used up once while the VMM took its bytes was too small.
        if self.delivered >= self.grew_at + self.window && self.window < most {
            growth = self.window.min(spare).min(most - self.window);
            self.window += growth;
            self.grew_at = self.delivered;
        }
        self.credit = self.credit.max(self.delivered + self.window);
        growth
    }

    /// By how much the window has grown.
    pub(super) fn grown(&self) -> u64 {
        self.window - FIRST_WINDOW
    }

    fn skip_to(&mut self, offset: u64) {
        self.received = self.received.max(offset);
        self.delivered = self.received;
    }
}
