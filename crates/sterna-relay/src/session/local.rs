//! The side of the VMMs: connections that open, bytes that are taken and delivered, ends.

use std::time::Duration;

use super::flow::{Flow, Open};
use super::incoming::Delivery;
use super::opening::Opening;
use super::outgoing::{End, Priority};
use super::piece::Piece;
use super::settings::{LARGEST_WINDOW, MOST_FLOWS, PRIORITY_BYTES, RESERVED, has_bug};
use super::{Event, Role, Session};
use crate::frame::ResetReason;

/// Time without progress after which a flow counts as one whose VMM does not read.
const STALLED: Duration = Duration::from_millis(100);

/// A flow takes bytes again when there is room for so much of the bytes in flight, or for so many.
const LEAST_SHARE: u64 = 8;
const LARGEST_STEP: u64 = 128 << 10;

impl Session {
    /// A VMM has connected. Only the dialer opens flows.
    pub fn open(&mut self, now: Duration) -> Opening {
        if self.role == Role::Acceptor || self.flows.len() >= MOST_FLOWS || self.is_over() {
            return Opening::Refused;
        }
        self.opened_through += 1;
        self.counters.flows += 1;
        self.flows.insert(self.opened_through, Flow::new(Open::Due, now));
        self.events.push(Event::Send);
        Opening::Flow(self.opened_through)
    }

    /// Sets the priority of what this side sends on a flow.
    pub fn set_priority(&mut self, flow: u32, priority: Priority) {
        if let Some(flow) = self.flows.get_mut(&flow) {
            flow.outgoing.priority = priority;
        }
    }

    /// How many bytes may be taken from the VMM of this flow now.
    pub fn room(&self, flow: u32, now: Duration) -> u64 {
        let Some(Flow { outgoing, .. }) = self.flows.get(&flow) else { return 0 };
        if outgoing.end.is_some() || outgoing.is_stopped || self.is_over() {
            return 0;
        }
        let spare = self.settings.buffer_bytes.saturating_sub(self.stored);
        let room = match outgoing.priority {
            Priority::Urgent => PRIORITY_BYTES.saturating_sub(outgoing.in_flight()),
            Priority::Bulk => {
                let own = outgoing.in_flight();
                let limit = self.rate.limit();
                // A stalled flow counts on its own.
                let all = if is_stalled(outgoing, now) { own } else { self.bulk_in_flight(now) };
                let room = limit.saturating_sub(all.max(own));
                // Bytes go in few large frames.
                if room < (limit / LEAST_SHARE).min(LARGEST_STEP) { 0 } else { room }
            }
        };
        room.min(spare)
    }

    /// Takes bytes of the VMM. The caller has asked for [`room`](Self::room).
    pub fn take(&mut self, flow: u32, piece: Piece, now: Duration) {
        let in_flight = self.bulk_in_flight(now);
        let Some(Flow { outgoing, .. }) = self.flows.get_mut(&flow) else { return };
        if outgoing.end.is_some() || outgoing.is_stopped || piece.is_empty() {
            return;
        }
        let bytes = piece.len() as u64;
        if outgoing.in_flight() == 0 {
            outgoing.progress_at = now;
        }
        let stamp = (outgoing.priority == Priority::Bulk).then(|| self.rate.taken(now, in_flight));
        outgoing.take(piece, stamp, now);
        self.stored += bytes;
        self.counters.taken += bytes;
        self.events.push(Event::Send);
    }

    /// Pages of guest memory begin at these offsets of the flow. Precedes [`take`](Self::take) with their first bytes.
    pub fn note_pages(&mut self, flow: u32, pages: &[u64]) {
        let Some(Flow { outgoing, .. }) = self.flows.get_mut(&flow) else { return };
        if self.packs && outgoing.end.is_none() && !outgoing.is_stopped {
            outgoing.note_pages(pages);
        }
    }

    /// The VMM has closed its connection for writing.
    pub fn finish(&mut self, flow: u32) {
        self.set_end(flow, End::Finish);
    }

    /// The VMM's connection broke, or could not be made: both directions end.
    pub fn reset(&mut self, flow: u32, reason: ResetReason) {
        self.set_end(flow, End::Reset(reason));
        self.stop(flow, reason);
    }

    /// The VMM's connection takes no more bytes.
    pub fn stop(&mut self, number: u32, reason: ResetReason) {
        let Some(flow) = self.flows.get_mut(&number) else { return };
        if flow.incoming.stop(reason) {
            self.events.push(Event::Send);
            self.forget_if_over(number);
        }
    }

    /// What the VMM's connection gets next; the same until [`delivered`](Self::delivered) or
    /// [`end_delivered`](Self::end_delivered).
    pub fn next_delivery(&self, flow: u32) -> Option<Delivery> {
        self.flows.get(&flow)?.incoming.next()
    }

    /// The VMM's connection has taken `bytes` bytes.
    pub fn delivered(&mut self, number: u32, bytes: u64) {
        let pool = self.settings.buffer_bytes - RESERVED;
        let spare =
            if has_bug!(self.settings, GrantsWithoutLimit) { u64::MAX } else { pool - self.grown.min(pool) };
        let most = if has_bug!(self.settings, GrantsWithoutLimit) {
            LARGEST_WINDOW
        } else {
            LARGEST_WINDOW.min(pool / 2)
        };
        let Some(flow) = self.flows.get_mut(&number) else { return };
        flow.incoming.delivered(bytes);
        self.grown += flow.incoming.grant(spare, most);
        self.counters.delivered += bytes;
        self.events.push(Event::Send);
    }

    /// The VMM's connection was closed for writing, or broken off, as the delivery asked.
    pub fn end_delivered(&mut self, number: u32) {
        let Some(flow) = self.flows.get_mut(&number) else { return };
        flow.incoming.end_delivered();
        self.forget_if_over(number);
    }

    /// Bytes of the flow that were ever given to a carrier, and bytes that the peer's VMM has taken.
    pub fn progress(&self, flow: u32) -> Option<(u64, u64)> {
        let outgoing = &self.flows.get(&flow)?.outgoing;
        Some((outgoing.sent, outgoing.delivered))
    }

    /// Bytes of the flow that this side's VMM has taken.
    pub fn delivered_bytes(&self, flow: u32) -> Option<u64> {
        Some(self.flows.get(&flow)?.incoming.delivered)
    }

    fn set_end(&mut self, number: u32, end: End) {
        let Some(flow) = self.flows.get_mut(&number) else { return };
        if flow.outgoing.set_end(end) {
            self.events.push(Event::Send);
        }
    }

    fn bulk_in_flight(&self, now: Duration) -> u64 {
        let bulk = self.flows.values().map(|flow| &flow.outgoing).filter(|it| it.priority == Priority::Bulk);
        bulk.filter(|it| !is_stalled(it, now)).map(super::outgoing::Outgoing::in_flight).sum()
    }
}

/// Whether the peer's VMM does not read this flow.
fn is_stalled(outgoing: &super::outgoing::Outgoing, now: Duration) -> bool {
    outgoing.waits_for_vmm() && now >= outgoing.progress_at + STALLED
}
