//! The side of the VMMs: their connections, and the bytes that are taken and delivered.

use std::sync::Arc;
use std::time::Duration;

use sterna_transport::Channel;

use super::{Live, LiveStatus};
use crate::relay::main_flow::Refusal;
use crate::session::{Delivery, Piece, Role};

impl Live {
    /// Registers the connection of a flow. False: the flow is over.
    pub(in crate::relay) fn plug(&self, flow: u32, channel: &Arc<Channel>) -> bool {
        let mut state = self.lock();
        if state.status == LiveStatus::Over || state.session.delivered_bytes(flow).is_none() {
            return false;
        }
        state.vmms.insert(flow, Arc::clone(channel));
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
            self.to_vmms.wait(&mut state);
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
            let is_gone = !state.vmms.contains_key(&flow) || state.session.is_over();
            if is_gone || state.session.progress(flow).is_none() {
                return Some(0);
            }
            match state.session.room(flow, self.now()) {
                0 => {}
                room => return Some(room),
            }
            self.room.wait_for(&mut state, Duration::from_millis(100));
        }
        None
    }

    /// Takes bytes of a VMM.
    pub(in crate::relay) fn take(&self, flow: u32, piece: Piece) -> Result<(), Refusal> {
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
        self.settle(&mut state);
        Ok(())
    }

    /// Waits for a delivery of the flow. `None`: the flow is over.
    pub(in crate::relay) fn next_delivery(&self, flow: u32) -> Result<Option<Delivery>, Refusal> {
        let mut state = self.lock();
        loop {
            if !state.vmms.contains_key(&flow) {
                return Ok(None);
            }
            if let Some(delivery) = state.session.next_delivery(flow) {
                if let Delivery::Bytes(piece) = &delivery {
                    if self.role == Role::Acceptor {
                        // Before the bytes are written: from then on the VMM may act on them.
                        state.main.stream(flow, piece, &mut Vec::new())?;
                    }
                    self.note_phase(&mut state);
                }
                return Ok(Some(delivery));
            }
            self.to_vmms.wait(&mut state);
        }
    }

    /// The VMM has taken these bytes.
    pub(in crate::relay) fn delivered(&self, flow: u32, piece: &[u8]) {
        let mut state = self.lock();
        if self.role == Role::Dialer {
            state.main.answers(flow, piece);
            self.note_phase(&mut state);
        }
        state.session.delivered(flow, piece.len() as u64);
        self.settle(&mut state);
    }
}
