//! The disturbances of a case over RDMA.

use std::time::Duration;

use sterna_transport::rdma::CompletionStatus;
use sterna_transport::rdma::double::{Fault, Host, Network, Trigger};

/// One disturbance, and its time.
#[derive(Debug, Clone, Copy)]
pub(super) enum Disturbance {
    /// The migration is not disturbed.
    Nothing,
    /// The source's operator cancels after this time.
    Cancel(Duration),
    /// The destination's operator gives up after this time.
    Abandon(Duration),
    /// An adapter of this side fails at a trigger.
    Fault(Side, Trigger, Fault),
    /// The link of a host goes down after the first duration. It stays down for the second.
    Link(Side, Duration, Duration),
}

/// The side whose adapter or link is disturbed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Side {
    Source,
    Destination,
}

const ENOMEM: i32 = 12;

impl Disturbance {
    pub(super) fn draw(random: &mut fastrand::Rng) -> Self {
        let soon = Duration::from_micros(random.u64(..60_000));
        let side = if random.bool() { Side::Source } else { Side::Destination };
        // A migration has some dozens of requests of its own, and some hundreds of writes.
        let within = [8, 40, 200][random.usize(..3)];
        let request = Trigger::Request(1 + random.u64(..within));
        match random.u8(..10) {
            0 => Self::Nothing,
            1 => Self::Cancel(soon),
            2 => Self::Abandon(soon),
            3 => Self::Fault(side, Trigger::Registration(1 + random.u64(..12)), Fault::Errno(ENOMEM)),
            4 | 5 => Self::Fault(side, request, Fault::Status(status(random))),
            6 => Self::Fault(side, request, Fault::Kill),
            7 => Self::Fault(side, request, Fault::LinkDown),
            8 => Self::Fault(side, request, Fault::RemoveDevice),
            // Shorter than the time for which an adapter retries, or longer.
            _ => Self::Link(side, soon, Duration::from_millis([20, 400][random.usize(..2)])),
        }
    }

    /// Plans a fault of an adapter. The other disturbances are applied during the migration.
    pub(super) fn plan(self, network: &Network, source: &Host, destination: &Host) {
        if let Self::Fault(side, trigger, fault) = self {
            network.plan(side.of(source, destination), trigger, fault);
        }
    }

    /// Whether the migration must succeed despite the disturbance.
    pub(super) fn is_harmless(self) -> bool {
        matches!(self, Self::Nothing)
    }
}

impl Side {
    pub(super) fn of<'a>(self, source: &'a Host, destination: &'a Host) -> &'a Host {
        match self {
            Self::Source => source,
            Self::Destination => destination,
        }
    }
}

fn status(random: &mut fastrand::Rng) -> CompletionStatus {
    use CompletionStatus::*;
    *random
        .choice(&[RemoteAccess, RemoteOperation, RetryExceeded, RnrRetryExceeded, LocalProtection])
        .unwrap_or(&RemoteAccess)
}
