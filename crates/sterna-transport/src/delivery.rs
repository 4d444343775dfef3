//! Delivery statistics of a TCP connection.

use std::time::Duration;

/// Round trips, acknowledgements and busy time of a TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivery {
    /// Time from sending to acknowledgement, smoothed by the kernel over recent packets.
    pub round_trip: Duration,
    /// The shortest round trip, including the handshake's: the one without waiting in the network's queues.
    pub least_round_trip: Duration,
    /// Bytes that the peer's kernel has acknowledged since the connection was established.
    pub acknowledged_bytes: u64,
    /// Total time in which there were unacknowledged bytes.
    pub busy: Duration,
    /// Time since the last acknowledgement from the peer's kernel.
    pub acknowledged_ago: Duration,
}

impl Delivery {
    /// Time that bytes wait in queues between the two ends.
    pub fn queueing(&self) -> Duration {
        self.round_trip.saturating_sub(self.least_round_trip)
    }
}
