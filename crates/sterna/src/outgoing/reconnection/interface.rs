//! The points at which a migration that may connect again differs.

use crate::error::MigrationError;
use crate::interruption::Break;
use crate::outgoing::transfer::Transfer;
use crate::precopy::Settings;

/// Reconnection, where the control thread asks for it.
///
/// What the methods do by themselves is right if a lost connection ends the migration.
pub(in crate::outgoing) trait Reconnection: Send {
    /// The peer is a Sterna that knows the migration's name: announces a reconnection after a loss, if the peer
    /// can wait.
    fn announce(&self, _transfer: &Transfer) -> Result<(), MigrationError> {
        Ok(())
    }

    /// The peer is known: warns if a lost connection ends the migration, against the operator's setting.
    fn peer_is_known(&self) {}

    /// Waits until the destination has promised to wait for this side after a loss. The promise may arrive from
    /// now on.
    fn await_promise(&self, _transfer: &mut Transfer) -> Result<(), Break> {
        Ok(())
    }

    /// Makes a lost connection replaceable from now on.
    ///
    /// Call it before the first page can be sent and lost. The caller must not return between this call and the
    /// moment at which the rounds are known.
    fn pages_begin(&self) {}

    /// Performs `BreakOff`: ends all sending and receiving of the session. Knowledge about pages is kept.
    fn break_off(&mut self, _transfer: &mut Transfer) -> Result<(), MigrationError> {
        Err(is_off())
    }

    /// Performs `Reconnect`: one attempt.
    fn reconnect(&mut self) -> Result<(), MigrationError> {
        Err(is_off())
    }

    /// The first half of `ResumePrecopy`: begins the session that was dialled, up to its return path.
    fn enter_session(&mut self, _transfer: &mut Transfer) -> Result<(), Break> {
        Err(is_off().into())
    }

    /// The second half: sends what the destination lacks. Gives the settings that the policy begins with.
    fn send_again(&mut self, _transfer: &mut Transfer) -> Result<Settings, Break> {
        Err(is_off().into())
    }

    /// No channel is open any more, and no session follows.
    fn close(&mut self) {}

    /// Tells the destination that it need not wait for this side any more.
    ///
    /// The migration has ended without the destination.
    fn say_farewell(&self) {}
}

/// A migration that a lost connection ends.
pub(in crate::outgoing) struct Off;

impl Reconnection for Off {}

fn is_off() -> MigrationError {
    MigrationError::Internal("an action of a reconnection, which is off".to_owned())
}
