//! Counters of a source over RDMA, as statistics show them. Over any other transport they are zero.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::stats::RdmaStatistics;

/// Totals since the migration began, and present values. They outlive the connection.
#[derive(Debug, Default)]
pub(in crate::outgoing) struct RdmaCounts {
    pub(in crate::outgoing) writes: AtomicU64,
    pub(in crate::outgoing) written_bytes: AtomicU64,
    pub(in crate::outgoing) in_flight_bytes: AtomicU64,
    pub(in crate::outgoing) queued_bytes: AtomicU64,
    pub(in crate::outgoing) registrations: AtomicU64,
    pub(in crate::outgoing) pinned_bytes: AtomicU64,
    pub(in crate::outgoing) windows: AtomicU64,
    pub(in crate::outgoing) destination_pinned_bytes: AtomicU64,
    pub(in crate::outgoing) exchanges: AtomicU64,
    pub(in crate::outgoing) receiver_not_ready: AtomicU64,
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
}
