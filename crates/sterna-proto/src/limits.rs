//! How long each wait may last.

use std::time::Duration;

/// The limit of every wait; [`Duration::MAX`] stands for none.
///
/// QEMU waits without limit in most of these places (spec §5.1); a peer that
/// stops must not hang us. Waits for an operator (pre-switchover, a held
/// guest) have no limit. Nor have local effects that are being undone: half
/// an effect cannot be taken back, so the machine waits for its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Both sides: from the start until all channels are up; at the source
    /// again until the peer is identified, and again until it has accepted
    /// the compatibility record.
    pub setup: Duration,
    /// Source: stopping the guest, and again releasing the hooks.
    pub stop: Duration,
    /// Source: sending the last RAM and the devices' state.
    pub switchover: Duration,
    /// Source: from the PREPARE ping until its PONG, within which the
    /// destination finishes loading and acquires its hooks.
    pub prepare: Duration,
    /// Source: handing EOF and the description to the transport.
    pub commit: Duration,
    /// Source: from EOF until SHUT.
    pub acknowledge: Duration,
    /// Source, undecided: from a question until its answer.
    pub ask: Duration,
    /// Source, undecided: from an answer that decides nothing until the next
    /// question.
    pub ask_interval: Duration,
    /// Source, undoing: how long to keep trying to re-acquire hooks, which
    /// the destination may still hold until it notices the end. Should be
    /// longer than the destination's `prepared`.
    pub reacquire: Duration,
    /// Source, undoing: from one such attempt to the next.
    pub reacquire_interval: Duration,
    /// Both sides: from the loss of a connection, once everything is taken back that the switchover had begun, until another
    /// one must be there. Zero: a lost connection ends the migration.
    pub reconnect: Duration,
    /// Source: from an attempt to connect again until the next one.
    pub reconnect_interval: Duration,
    /// Destination: finishing the load once the last element was read.
    pub load: Duration,
    /// Destination: from PONG until EOF. When it is over, the destination
    /// gives the guest up for good.
    pub prepared: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            setup: seconds(30),
            stop: seconds(30),
            // downtime-limit goes up to 2,000 s; the transport's stall limit
            // is what catches a peer that stops reading.
            switchover: seconds(2_400),
            prepare: seconds(60),
            commit: seconds(30),
            acknowledge: seconds(30),
            ask: seconds(5),
            ask_interval: seconds(2),
            reacquire: seconds(90),
            reacquire_interval: Duration::from_millis(250),
            reconnect: Duration::ZERO,
            reconnect_interval: Duration::from_millis(250),
            load: seconds(60),
            prepared: seconds(60),
        }
    }
}

/// The moment at which a wait that begins now is over; none if it has no limit.
pub(crate) fn after(now: Duration, limit: Duration) -> Option<Duration> {
    now.checked_add(limit).filter(|end| *end != Duration::MAX)
}
