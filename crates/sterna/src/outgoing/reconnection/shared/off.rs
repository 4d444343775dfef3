//! A source that connects once, because the feature `reconnect` is off.

use parking_lot::Mutex;
use sterna_transport::Address;

use crate::error::MigrationError;
use crate::order::RoundPages;
use crate::outgoing::postcopy::recovery::Recovery;

/// State for a new connection of a postcopy. Precopy ends with its connection.
pub(in crate::outgoing) struct SharedReconnection {
    pub recovery: Recovery,
    pub lost: Mutex<Option<MigrationError>>,
    pub last_attempt: Mutex<Option<String>>,
}

impl SharedReconnection {
    pub(in crate::outgoing) fn new(to: Address) -> Self {
        Self { recovery: Recovery::new(to), lost: Mutex::default(), last_attempt: Mutex::default() }
    }

    pub(in crate::outgoing) fn confirms_rounds(&self) -> bool {
        false
    }

    pub(in crate::outgoing) fn begin_round(&self, _: &RoundPages) {}

    pub(in crate::outgoing) fn round_is_confirmed(&self) -> Result<(), MigrationError> {
        Ok(())
    }

    pub(in crate::outgoing) fn is_promised(&self) {}
}
