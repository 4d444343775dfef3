//! Bytes that the thread which took them passes on itself: no other thread has to wake up for them.
//!
//! - The thread that reads a VMM writes to the carrier, if no other thread does. It may wait there as long as the carrier
//!   exists.
//! - The thread that reads a carrier writes to the VMM, and acknowledges. It must never wait for a connection: two relays whose
//!   readers wait for each other would never continue. It writes as much as the connection takes at once, and leaves the rest to the
//!   threads of the connections.

use std::sync::Arc;

use super::places::{Passing, Sending};
use super::{Live, State};
use crate::relay::main_flow::Refusal;
use crate::relay::readiness::is_writable;
use crate::session::{CarrierId, Delivery, OutgoingFrame, Piece, Priority, Role};

/// Most acknowledgements that are sent at once without the carrier's own thread.
const MOST_ACKNOWLEDGEMENTS: usize = 16;

impl Live {
    /// Takes the frames of the carrier of this flow, if no other thread writes to it.
    pub(super) fn send_directly(&self, state: &mut State, flow: u32) -> Option<Sending> {
        if state.session.is_over() || state.packing.known().is_some() {
            return None;
        }
        let id = state.session.carrier_for(flow)?;
        let place = state.carriers.get(&id).filter(|place| !place.is_writing)?;
        let channel = Arc::clone(&place.channel);
        // Only the carrier's own thread waits for the limit.
        let is_limited = self.options.limit.bytes_per_second() > 0;
        let least = if is_limited { Priority::Urgent } else { Priority::Bulk };
        let mut frames = Vec::new();
        self.gather(state, id, least, &mut frames);
        self.begin_writing(state, id, &frames);
        (!frames.is_empty()).then_some(Sending { id, channel, frames })
    }

    /// The frames that this thread took from the carrier are written.
    pub(in crate::relay) fn written(&self, id: CarrierId) {
        let mut state = self.lock();
        if let Some(place) = state.carriers.get_mut(&id) {
            place.is_writing = false;
        }
        self.wake_carriers(&mut state);
    }

    /// The delivery of this flow for a thread that must not wait, if no other thread delivers.
    pub(super) fn pass_directly(&self, state: &mut State, flow: u32) -> Result<Option<Passing>, Refusal> {
        let place = state.vmms.get(&flow).filter(|place| !place.is_delivering && place.control.is_off());
        let Some(channel) = place.map(|place| Arc::clone(&place.channel)) else { return Ok(None) };
        let Some(Delivery::Bytes(piece)) = state.session.next_delivery(flow) else { return Ok(None) };
        self.begin_delivery(state, flow, &piece)?;
        Ok(Some(Passing { flow, channel, piece }))
    }

    /// Before the bytes are written: from then on the VMM may act on them.
    pub(super) fn begin_delivery(&self, state: &mut State, flow: u32, piece: &Piece) -> Result<(), Refusal> {
        let delivered = state.session.delivered_bytes(flow).unwrap_or_default();
        let Some(place) = state.vmms.get_mut(&flow) else { return Ok(()) };
        place.is_delivering = true;
        let known = place.read_to.saturating_sub(delivered).min(piece.len() as u64) as usize;
        place.read_to = delivered + piece.len() as u64;
        if self.role == Role::Acceptor && known < piece.len() {
            state.main.stream(flow, &piece[known..], &mut Vec::new())?;
        }
        self.note_phase(state);
        Ok(())
    }

    /// The VMM has taken these bytes of the delivery. Returns acknowledgements that this thread has to write.
    pub(in crate::relay) fn passed_on(&self, flow: u32, taken: &[u8]) -> Option<Sending> {
        let mut state = self.lock();
        self.end_delivery(&mut state, flow, taken);
        let sending = self.acknowledge_directly(&mut state);
        self.settle(&mut state);
        // The rest, or what came meanwhile.
        state.wake_delivery(flow);
        sending
    }

    pub(super) fn end_delivery(&self, state: &mut State, flow: u32, taken: &[u8]) {
        if let Some(place) = state.vmms.get_mut(&flow) {
            place.is_delivering = false;
        }
        if taken.is_empty() {
            return;
        }
        if self.role == Role::Dialer {
            state.main.answers(flow, taken);
            self.note_phase(state);
        }
        state.session.delivered(flow, taken.len() as u64);
    }

    /// Acknowledgements, if their carrier takes them at once.
    fn acknowledge_directly(&self, state: &mut State) -> Option<Sending> {
        let id = state.session.acknowledging_carrier()?;
        let place = state.carriers.get(&id).filter(|place| !place.is_writing)?;
        let channel = Arc::clone(&place.channel);
        if !is_writable(&channel) {
            return None;
        }
        let frames: Vec<OutgoingFrame> = std::iter::from_fn(|| state.session.next_acknowledgement_of(id))
            .take(MOST_ACKNOWLEDGEMENTS)
            .map(OutgoingFrame::from)
            .collect();
        self.begin_writing(state, id, &frames);
        (!frames.is_empty()).then_some(Sending { id, channel, frames })
    }

    pub(super) fn begin_writing(&self, state: &mut State, id: CarrierId, frames: &[OutgoingFrame]) {
        if let Some(place) = state.carriers.get_mut(&id) {
            place.is_writing = !frames.is_empty();
        }
    }
}
