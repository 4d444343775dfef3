//! Counters of a network, with which tests check costs and find leaks.

/// Counters of one host, or of the whole network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Registrations that exist now.
    pub registrations: u64,
    /// Registrations made since the start.
    pub registrations_made: u64,
    /// Registrations that failed since the start.
    pub registrations_failed: u64,
    /// Bytes that the existing registrations pin.
    pub pinned_bytes: u64,
    /// Maximum of `pinned_bytes` so far. For several hosts: the sum of their maxima.
    pub pinned_bytes_most: u64,
    /// Registrations of which a page was discarded while they existed. This is a bug of the memory's owner.
    pub stale_registrations: u64,
    /// Queue pairs that exist now.
    pub queue_pairs: u64,
    /// Queue pairs created since the start.
    pub queue_pairs_made: u64,
    /// Listeners that exist now.
    pub listeners: u64,
    /// Connect requests that this host has not answered yet.
    pub requests: u64,
    /// Number of executed sends.
    pub sends: u64,
    /// Bytes of the executed sends.
    pub send_bytes: u64,
    /// Number of completely executed writes, including those with immediate.
    pub writes: u64,
    /// Bytes of the executed writes.
    pub write_bytes: u64,
    /// Bytes of the longest executed write.
    pub write_bytes_most: u64,
    /// Number of sends, and writes with immediate, that found no receive posted.
    pub rnrs: u64,
    /// Number of requests that failed with their own error, not flushed.
    pub failed_requests: u64,
    /// Number of flushed requests and receives.
    pub flushed: u64,
}

impl Counts {
    /// Objects that still exist and should not at the end of a test, in words.
    pub fn leaks(&self) -> Vec<String> {
        let there = [
            (self.registrations, "registrations"),
            (self.pinned_bytes, "pinned bytes"),
            (self.queue_pairs, "queue pairs"),
            (self.listeners, "listeners"),
            (self.requests, "unanswered requests"),
        ];
        there.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect()
    }

    pub(super) fn add(&mut self, other: &Counts) {
        let most = self.write_bytes_most.max(other.write_bytes_most);
        for (sum, more) in [
            (&mut self.registrations, other.registrations),
            (&mut self.registrations_made, other.registrations_made),
            (&mut self.registrations_failed, other.registrations_failed),
            (&mut self.pinned_bytes, other.pinned_bytes),
            (&mut self.pinned_bytes_most, other.pinned_bytes_most),
            (&mut self.stale_registrations, other.stale_registrations),
            (&mut self.queue_pairs, other.queue_pairs),
            (&mut self.queue_pairs_made, other.queue_pairs_made),
            (&mut self.listeners, other.listeners),
            (&mut self.requests, other.requests),
            (&mut self.sends, other.sends),
            (&mut self.send_bytes, other.send_bytes),
            (&mut self.writes, other.writes),
            (&mut self.write_bytes, other.write_bytes),
            (&mut self.rnrs, other.rnrs),
            (&mut self.failed_requests, other.failed_requests),
            (&mut self.flushed, other.flushed),
        ] {
            *sum += more;
        }
        self.write_bytes_most = most;
    }
}
