//! What a source over RDMA counts.

use std::sync::atomic::Ordering;

use crate::outgoing::measure::rdma_counts::RdmaCounts;

impl RdmaCounts {
    pub(super) fn posted(&self, writes: u64, bytes: u64) {
        self.writes.fetch_add(writes, Ordering::Relaxed);
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn lane(&self, in_flight_bytes: u64, queued_bytes: u64) {
        self.in_flight_bytes.store(in_flight_bytes, Ordering::Relaxed);
        self.queued_bytes.store(queued_bytes, Ordering::Relaxed);
    }

    /// Adds the bytes of a packet that a lane has filled.
    pub(super) fn packet_queued(&self, bytes: u64) {
        self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Subtracts the bytes of a packet that a lane posts from the queued ones.
    pub(super) fn packet_posted(&self, bytes: u64) {
        self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.in_flight_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Subtracts bytes that have arrived at the destination from those in flight.
    pub(super) fn packet_completed(&self, bytes: u64) {
        self.in_flight_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn registered(&self, bytes: u64) {
        self.registrations.fetch_add(1, Ordering::Relaxed);
        self.pinned_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn deregistered(&self, bytes: u64) {
        self.pinned_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn window(&self, bytes: u64) {
        self.windows.fetch_add(1, Ordering::Relaxed);
        self.destination_pins(bytes);
    }

    pub(super) fn destination_pins(&self, bytes: u64) {
        self.destination_pinned_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn given_back(&self, bytes: u64) {
        self.destination_pinned_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn exchanged(&self) {
        self.exchanges.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn receiver_was_not_ready(&self) {
        self.receiver_not_ready.fetch_add(1, Ordering::Relaxed);
    }

    /// Resets the present values: the connection is closed, and all registrations ended with it.
    pub(super) fn closed(&self) {
        let gone =
            [&self.in_flight_bytes, &self.queued_bytes, &self.pinned_bytes, &self.destination_pinned_bytes];
        gone.iter().for_each(|counter| counter.store(0, Ordering::Relaxed));
    }
}
