//! How an incoming migration ended, and what an operator sees of it on the way.

use sterna_proto::destination::State;

use crate::error::MigrationError;
use crate::events::Status;
use crate::vm::RunState;

/// How a migration ended at the destination.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Arrival {
    /// The guest is here, and runs or not as it did at the source.
    Completed(RunState),
    /// It never ran here and never will; RAM was discarded and the VM reset.
    Failed(MigrationError),
}

/// What an operator sees of `state`.
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
