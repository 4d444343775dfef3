//! What a network counts.

/// What happened at one host, or on the whole network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Registrations that are there now.
    pub registrations: u64,
    /// Registrations that were ever made.
    pub registrations_made: u64,
    /// Registrations that failed.
    pub registrations_failed: u64,
    /// Bytes that are registered now, and pinned if the registration pins.
    pub pinned_bytes: u64,
    /// The most that were pinned at once (of several hosts: the sum of their most).
    pub pinned_bytes_most: u64,
    /// Registrations of which a page was discarded while they were there: a violation of whoever owns the memory.
    pub stale_registrations: u64,
    /// Queue pairs that are there now.
    pub queue_pairs: u64,
    /// Queue pairs that were ever made.
    pub queue_pairs_made: u64,
    /// Listeners that are there now.
    pub listeners: u64,
    /// Connect requests that wait for an answer of this host.
    pub requests: u64,
    /// Sends that were executed.
    pub sends: u64,
    /// Bytes in them.
    pub send_bytes: u64,
    /// Writes that were executed whole, those with immediate included.
    pub writes: u64,
    /// Bytes in them.
    pub write_bytes: u64,
    /// The longest of them.
    pub write_bytes_most: u64,
    /// Sends, or writes with immediate, that found no receive posted.
    pub rnrs: u64,
    /// Requests that ended with an error of their own.
    pub failed_requests: u64,
    /// Requests and receives that were flushed.
    pub flushed: u64,
}

impl Counts {
    /// What is still there and should not be at the end of a test.
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
