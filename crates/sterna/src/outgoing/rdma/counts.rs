//! Counters of a source over RDMA.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::stats::RdmaStatistics;

/// Totals since the migration began, and present values. They outlive the connection.
#[derive(Debug, Default)]
pub(in crate::outgoing) struct RdmaCounts {
    writes: AtomicU64,
    written_bytes: AtomicU64,
    in_flight_bytes: AtomicU64,
    queued_bytes: AtomicU64,
    registrations: AtomicU64,
    pinned_bytes: AtomicU64,
    windows: AtomicU64,
    destination_pinned_bytes: AtomicU64,
    exchanges: AtomicU64,
    receiver_not_ready: AtomicU64,
}

impl RdmaCounts {
    /// The totals and values at this moment.
    pub(in crate::outgoing) fn now(&self) -> RdmaStatistics {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RdmaStatistics {
            writes: get(&self.writes),
            written_bytes: get(&self.written_bytes),
            in_flight_bytes: get(&self.in_flight_bytes),
            registrations: get(&self.registrations),
            pinned_bytes: get(&self.pinned_bytes),
            windows: get(&self.windows),
            destination_pinned_bytes: get(&self.destination_pinned_bytes),
            exchanges: get(&self.exchanges),
            receiver_not_ready: get(&self.receiver_not_ready),
        }
    }

    /// Bytes of pages that lanes have taken and not posted yet.
    pub(in crate::outgoing) fn queued_bytes(&self) -> u64 {
        self.queued_bytes.load(Ordering::Relaxed)
    }

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
