//! Texts about the guest's custody. They tell why the guest cannot be migrated, or cannot be started and stopped by
//! an operator.

use sterna::Status;
use sterna::ram::Custody;

use super::engine::Outgoing;
use crate::error::QmpError;

pub(super) const REACHING: &str = "This VM is connecting to the guest's standby: 'migrate_cancel' ends that";
pub(super) const NOT_STARTED: &str =
    "The guest has arrived and is not started yet; start it with 'cont' first";

pub(super) const NO_GUEST: &str = "Guest is waiting for an incoming migration; migrate it when it runs here";

/// The reason why a guest with this custody cannot be migrated. None if it can.
pub(super) fn cannot_leave(custody: Custody) -> Option<&'static str> {
    Some(match custody {
        Custody::Free | Custody::Arrived => return None,
        Custody::Leaving { .. } => {
            "There's a migration process in progress; wait for its end or cancel it with 'migrate_cancel'"
        }
        Custody::Undecided => {
            "There's a migration process in progress: the guest may run at its destination; find that out and decide \
             with 'x-sterna-decide'"
        }
        Custody::Held => {
            "Can't migrate the vm that was paused due to previous migration: the guest could not be resumed, and \
             'query-migrate' contains the reason; 'cont' tries again"
        }
        Custody::Saved => {
            "Can't migrate the vm that was paused due to previous migration: the guest was saved to a file; 'cont' \
             resumes it here"
        }
        Custody::Gone => {
            "Can't migrate the vm that was paused due to previous migration: the guest runs at its destination; \
             migrate it from there"
        }
        Custody::Arriving { is_free: true } => {
            "The guest's incoming migration is about to end; wait until 'query-migrate' shows 'completed'"
        }
        Custody::Arriving { is_free: false } => NOT_STARTED,
        Custody::NoGuest => NO_GUEST,
        Custody::Replaced => "The guest's memory is being changed; try again",
    })
}

/// The refusal of a command while a migration has the guest, from the stop for its switchover on.
pub(super) fn not_free(custody: Custody, outgoing: Option<&dyn Outgoing>) -> QmpError {
    let what_to_do = match custody {
        Custody::Undecided => {
            "it may run at the destination; find that out and decide with 'x-sterna-decide'"
        }
        Custody::Gone => {
            "it has moved to the destination and must not run here as well; 'quit' this VM, or migrate the \
             guest back from there"
        }
        Custody::Held => "it could not be resumed ('query-migrate' has the reason); 'cont' tries again",
        Custody::NoGuest => "its incoming migration has failed; wait for another migration",
        Custody::Replaced => "the guest's memory is being changed; try again",
        _ if outgoing.is_some_and(|outgoing| outgoing.status() == Status::PreSwitchover) => {
            "'migrate-continue' continues, 'migrate_cancel' resumes the guest here"
        }
        _ => "wait until 'query-migrate' shows its end",
    };
    QmpError::generic(format!("A migration's switchover has the guest: {what_to_do}"))
}

pub(super) const ONE_CHANNEL: &str = "Migration requires multi-channel URIs (e.g. tcp) while the capability 'multifd' is on; one \
     descriptor is one channel";
