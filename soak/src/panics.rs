//! The blow of a callback that panics. The expected effect depends on the callback at the stop.

use std::sync::Arc;

use sterna::{Migration, Outcome, RunState, SourceVm};

use crate::ledger::Ledger;
use crate::staged::Staged;
use crate::stop::{Side, Stop};

/// The effect of a panic at a stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// The migration continues: the panic is an observer's, is too late to matter, or the stop is in no
    /// callback.
    Nothing,
    /// The panic counts as an error of the callback: the migration fails, and the guest keeps running at the
    /// source.
    Fails,
    /// The migration is being undone, and the undoing continues.
    Undone,
    /// The destination never releases the lease: the source holds the guest until the lease is taken from it.
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

/// Whether the panic is in the callback that would end the tracking of writes.
pub(crate) fn leaves_tracking(stop: Stop) -> bool {
    stop == Stop::AfterShut
}

/// Checks that the guest is held without its lease. Then takes the lease from the destination and retries,
/// which returns the guest to the source.
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
