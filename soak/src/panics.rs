//! The blow of a callback that panics: what must come of it hangs on the callback that stands at the stop.

use std::sync::Arc;

use sterna::{Migration, Outcome, RunState, SourceVm};

use crate::ledger::Ledger;
use crate::staged::Staged;
use crate::stop::{Side, Stop};

/// What a panic at a stop leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// It is an observer's, or comes too late to matter, or no callback stands there: the migration goes on.
    Nothing,
    /// It is that callback's error: the migration fails, the guest runs on at the source.
    Fails,
    /// The migration is being undone, and goes on being undone.
    Undone,
    /// The destination never lets go of the lease: the source holds the guest until somebody else does.
    Holds,
}

pub(crate) fn effect(stop: Stop) -> Effect {
    match stop {
        Stop::Comparing
        | Stop::Lane
        | Stop::Stopping
        | Stop::Quiescing
        | Stop::Releasing
        | Stop::ReadingStream
        | Stop::LoadingStream
        | Stop::Devices
        | Stop::LoadingDevices
        | Stop::Completing
        | Stop::Acquiring
        | Stop::AwaitingAck => Effect::Fails,
        Stop::Cancelling | Stop::Failing => Effect::Undone,
        Stop::GivingBack => Effect::Holds,
        Stop::Setup
        | Stop::Arrival
        | Stop::Identifying
        | Stop::FirstPass
        | Stop::LaterPass
        | Stop::StepStop
        | Stop::PreSwitchover
        | Stop::StepRelease
        | Stop::LastSync
        | Stop::LastPages
        | Stop::StepStreams
        | Stop::StepDevices
        | Stop::BeforeCommit
        | Stop::AfterCommit
        | Stop::StepPrepare
        | Stop::BeforeShut
        | Stop::AfterShut
        | Stop::StepStart
        | Stop::Undecided => Effect::Nothing,
    }
}

/// Whether the callback that panics is the one that would end the tracking of writes.
pub(crate) fn leaves_tracking(stop: Stop) -> bool {
    stop == Stop::AfterShut
}

/// The guest must be held now, without its lease. Then somebody takes the lease from the destination, and the guest is
/// brought back.
pub(crate) fn free_held(vm: &Arc<Staged>, migration: &Migration, ledger: &Ledger) -> Result<(), String> {
    let outcome = migration.outcome();
    if !matches!(outcome, Some(Outcome::Failed { held: true, .. })) {
        return Err(format!("the destination keeps the lease, and the guest is not held: {outcome:?}"));
    }
    if migration.may_guest_run() || vm.run_state() != RunState::Paused {
        return Err("a held guest may run".into());
    }
    ledger.release(Side::Destination);
    migration.retry().map_err(|error| error.to_string())?;
    migration.wait();
    Ok(())
}
