//! The result of an incoming migration, and the status that an operator sees before the end.

use sterna_proto::destination::State;

use crate::error::MigrationError;
use crate::events::Status;
use crate::vm::RunState;

/// How a migration ended at the destination.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Arrival {
    /// The guest has arrived. It runs if it ran at the source, otherwise it is paused.
    Completed(RunState),
    /// The guest never ran here and cannot start here. RAM was discarded and the VM was reset.
    Failed(MigrationError),
}

/// Maps a state of the handover machine to the status that an operator sees.
pub(super) fn status_of(state: State) -> Status {
    match state {
        State::Setup => Status::Setup,
        State::Active
        | State::Completing
        | State::Preparing
        | State::Prepared
        | State::Suspending
        | State::Suspended
        | State::Committed => Status::Active,
        State::Held => Status::Held,
        State::Postcopy => Status::PostcopyActive,
        State::PostcopyPaused => Status::PostcopyPaused,
        State::PostcopyRecover => Status::PostcopyRecover,
        State::Running | State::Paused => Status::Completed,
        State::Failing => Status::Failing,
        State::Failed => Status::Failed,
    }
}
