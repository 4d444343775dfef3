//! One flow: its two directions.

use std::time::Duration;

use super::carriers::CarrierId;
use super::incoming::Incoming;
use super::outgoing::{Outgoing, Priority};

/// The state of one flow at one side.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) outgoing: Outgoing,
    pub(super) incoming: Incoming,
    pub(super) open: Open,
    /// Dialer: OPEN was sent at least once.
    pub(super) was_opened: bool,
}

/// How far the opening of a flow is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Open {
    /// Dialer: OPEN has to be sent.
    Due,
    /// Dialer: OPEN is on the way.
    Sent,
    /// Dialer: the peer knows the flow.
    Known,
    /// Acceptor: OPEN came on this carrier.
    By(CarrierId),
}

impl Flow {
    pub(super) fn new(open: Open, now: Duration) -> Self {
        Self { outgoing: Outgoing::new(now), incoming: Incoming::new(), open, was_opened: false }
    }

    /// Whether the peer knows the flow for certain.
    pub(super) fn is_known(&self) -> bool {
        matches!(self.open, Open::Known | Open::By(_))
    }

    /// Whether the peer can know the flow.
    pub(super) fn may_be_known(&self) -> bool {
        self.was_opened || matches!(self.open, Open::By(_))
    }

    pub(super) fn is_over(&self) -> bool {
        self.outgoing.end_acknowledged && self.incoming.is_over()
    }

    /// Whether this direction has a frame for its carrier.
    pub(super) fn has_work(&self, packs: bool, now: Duration) -> bool {
        let packs = packs && self.outgoing.priority == Priority::Bulk;
        self.open == Open::Due || self.outgoing.has_work(packs, now)
    }

    /// Whether its carrier may not change, because frames may be on the way.
    pub(super) fn is_bound(&self) -> bool {
        self.open == Open::Sent || self.outgoing.is_unacknowledged()
    }
}
