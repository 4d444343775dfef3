//! The side of the VMMs: their connections, and the bytes that are taken and delivered.

use std::sync::Arc;
use std::time::Duration;

use sterna_transport::Channel;

use super::places::VmmPlace;
use super::{Live, LiveStatus, Sending, State};
use crate::frame::ResetReason;
use crate::relay::control_flow::ControlFlow;
use crate::relay::main_flow::Refusal;
use crate::relay::options::Notice;
use crate::session::{Delivery, Piece, Role};

impl Live {
    /// Registers the connection of a flow. False: the flow is over.
    pub(in crate::relay) fn plug(
        &self,
        flow: u32,
        channel: &Arc<Channel>,
        control: &Arc<ControlFlow>,
    ) -> bool {
        let mut state = self.lock();
        if state.status == LiveStatus::Over || state.session.delivered_bytes(flow).is_none() {
            return false;
        }
        state.vmms.insert(flow, VmmPlace::new(channel, control));
        self.settle(&mut state);
        true
    }

    /// The next flow to connect, at the acceptor. `None`: the session is over.
    pub(in crate::relay) fn next_connect(&self) -> Option<u32> {
        let mut state = self.lock();
        loop {
            if state.status == LiveStatus::Over {
                return None;
            }
            if let Some(flow) = state.connects.pop_front() {
                return Some(flow);
            }
            self.connector.wait(&mut state);
        }
    }

    /// Whether there is no carrier.
    pub(in crate::relay) fn is_away(&self) -> bool {
        self.lock().lost.is_some()
    }

    /// Waits until the flow may take bytes. 0: it is over. Returns at least every 100 ms, with `None`.
    pub(in crate::relay) fn wait_for_room(&self, flow: u32) -> Option<u64> {
        let mut state = self.lock();
        for _ in 0..2 {
            if state.session.is_over() || state.session.progress(flow).is_none() {
                return Some(0);
            }
            let free = state.session.room(flow, self.now());
            let Some(place) = state.vmms.get_mut(&flow) else { return Some(0) };
            if free > 0 {
                return Some(free);
            }
            place.waits_for_room = true;
            let room = Arc::clone(&place.room);
            room.wait_for(&mut state, Duration::from_millis(100));
            if let Some(place) = state.vmms.get_mut(&flow) {
                place.waits_for_room = false;
            }
        }
        None
    }

    /// Takes bytes of a VMM. Returns frames that this thread has to write.
    pub(in crate::relay) fn take(&self, flow: u32, piece: Piece) -> Result<Option<Sending>, Refusal> {
        let mut state = self.lock();
        match self.role {
            Role::Dialer => {
                let mut pages = Vec::new();
                let kind = state.main.stream(flow, &piece, &mut pages)?;
                if let Some(kind) = kind {
                    state.session.set_priority(flow, kind.priority());
                }
                state.session.note_pages(flow, &pages);
            }
            Role::Acceptor => state.main.answers(flow, &piece),
        }
        state.session.take(flow, piece, self.now());
        self.note_phase(&mut state);
        let sending = self.send_directly(&mut state, flow);
        self.settle(&mut state);
        Ok(sending)
    }

    /// Waits for a delivery of the flow. `None`: the flow is over.
    pub(in crate::relay) fn next_delivery(&self, flow: u32) -> Result<Option<Delivery>, Refusal> {
        let mut state = self.lock();
        loop {
            let Some(place) = state.vmms.get(&flow) else { return Ok(None) };
            let deliveries = Arc::clone(&place.deliveries);
            if !place.is_delivering
                && let Some(delivery) = state.session.next_delivery(flow)
            {
                if let Delivery::Bytes(piece) = &delivery {
                    self.begin_delivery(&mut state, flow, piece)?;
                }
                return Ok(Some(delivery));
            }
            if let Some(place) = state.vmms.get_mut(&flow) {
                place.is_waiting = true;
            }
            deliveries.wait(&mut state);
            if let Some(place) = state.vmms.get_mut(&flow) {
                place.is_waiting = false;
            }
        }
    }

    /// The VMM has taken these bytes.
    pub(in crate::relay) fn delivered(&self, flow: u32, piece: &[u8]) {
        let mut state = self.lock();
        self.end_delivery(&mut state, flow, piece);
        self.settle(&mut state);
    }

    /// Breaks a flow off, because the relay does not carry it.
    pub(in crate::relay) fn refuse(&self, state: &mut State, flow: u32, refusal: Refusal) {
        if let Some(place) = state.vmms.get(&flow) {
            place.channel.shutdown();
        }
        self.options.notices.send(Notice::Refused { session: Some(self.id), why: refusal.to_string() });
        state.session.reset(flow, ResetReason::Refused);
    }
}
