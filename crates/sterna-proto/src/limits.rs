//! Time limits of a handover's waits, so that a peer that stops responding cannot hang this side.

use std::time::Duration;

/// The limit of every wait; [`Duration::MAX`] means no limit.
///
/// QEMU waits without limit in most of these places (spec §5.1). Two kinds of wait have no limit
/// here either. One is a wait for an operator (pre-switchover, a held guest). The other is a wait
/// for a local effect that is being undone: half an effect cannot be taken back, so the machine
/// waits for its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Both sides: from the start until all channels are connected. The source waits as long again
    /// until the peer is identified, again until the peer has made its VM from this side's
    /// configuration, and again until the peer has accepted the compatibility record.
    pub setup: Duration,
    /// Source: stopping the guest. The same limit applies again to releasing the hooks.
    pub stop: Duration,
    /// Source: sending the last RAM and the devices' state.
    pub switchover: Duration,
    /// Source: from the PREPARE ping until its PONG.
    ///
    /// Within this time the destination finishes loading and acquires its hooks.
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
    /// Source, undoing: how long to retry the re-acquisition of hooks. The destination may still
    /// own them until it notices the end, so this should be longer than the destination's
    /// `prepared`.
    pub reacquire: Duration,
    /// Source, undoing: from one attempt to re-acquire hooks until the next.
    pub reacquire_interval: Duration,
    /// Both sides: how long to wait for another connection after a loss. The wait begins when the
    /// switchover's effects are undone. Zero: a lost connection ends the migration.
    pub reconnect: Duration,
    /// Source: from one attempt to reconnect until the next.
    pub reconnect_interval: Duration,
    /// Destination: finishing the load after the last element was read.
    pub load: Duration,
    /// Destination: from PONG until EOF. After that time the destination gives the guest up and
    /// never runs it.
    pub prepared: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            setup: seconds(30),
            stop: seconds(30),
            // `downtime-limit` can be up to 2,000 s. The transport's stall limit detects a peer
            // that stops reading earlier.
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

/// The end of a wait that begins now; `None` if the wait has no limit.
pub(crate) fn after(now: Duration, limit: Duration) -> Option<Duration> {
    now.checked_add(limit).filter(|end| *end != Duration::MAX)
}
