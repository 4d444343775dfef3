//! The machine's reason of a failure, as an error with text.

use std::sync::Arc;

use sterna_proto::source::Cause;

use super::limits::limit_of;
use super::shared::Shared;
use crate::error::{Awaited, BadAnswer, Ending, MigrationError};

impl Shared {
    /// Records the reason, unless a thread has recorded a better one. Gives the recorded error.
    pub(super) fn note_cause(&self, cause: Cause) -> MigrationError {
        if let Some(error) = self.error() {
            return error;
        }
        let explained = self.explain(cause);
        self.note_error(explained.clone());
        self.error().unwrap_or(explained)
    }

    fn explain(&self, cause: Cause) -> MigrationError {
        let lost = || Ending::Lost.into();
        match cause {
            Cause::TimedOut(state) => {
                let after = limit_of(state, &self.params().limits);
                MigrationError::Limit { what: Awaited::Source(state), after }
            }
            Cause::DestinationFailed(code) => MigrationError::DestinationFailed(code),
            Cause::DestinationNever => Ending::NeverThere.into(),
            Cause::OperatorDecided => Ending::OperatorDecided.into(),
            Cause::OperatorPaused => Ending::OperatorPaused.into(),
            Cause::NotReconnected => {
                let why = self.reconnection.lost.lock().clone().unwrap_or_else(lost);
                let (window, last) =
                    (self.params().reconnect_window, self.reconnection.last_attempt.lock().clone());
                MigrationError::NotReconnected { why: Arc::new(why), window, last }
            }
            Cause::ConnectionLost | Cause::Eof => lost(),
            Cause::PeerMisbehaved => BadAnswer::Unasked.into(),
            Cause::LocalFailure | Cause::GuestStop | Cause::HookRelease => {
                MigrationError::Internal(format!("failed for an unrecorded reason: {cause:?}"))
            }
        }
    }
}
