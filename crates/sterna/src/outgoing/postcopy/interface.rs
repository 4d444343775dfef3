//! The points at which a migration with postcopy differs.

use sterna_proto::source::Cause;

use crate::error::{MigrationError, NoConvergence};
use crate::interruption::Break;
use crate::outgoing::switchover::Switchover;
use crate::outgoing::transfer::Transfer;

/// Postcopy, where the control thread asks for it. What the methods do by themselves is right without postcopy.
pub(in crate::outgoing) trait Postcopy: Send {
    /// Whether the first round may leave out pages that the guest does not use.
    fn takes_hints(&self) -> bool {
        true
    }

    /// No page was sent over these channels: tells the destination that postcopy may follow.
    ///
    /// The destination must support it. A refusal comes while the guest still runs here.
    fn advise(&self, _transfer: &Transfer) -> Result<(), MigrationError> {
        Ok(())
    }

    /// The policy has nothing urgent: requests the switch if it is due. True: the guest is about to be stopped.
    fn switch(&mut self, _transfer: &mut Transfer) -> Result<bool, Break> {
        Ok(false)
    }

    /// Precopy does not converge, for the reason `why`. True: the switch was requested, so that the migration
    /// continues.
    fn takes_over(&self, _why: &NoConvergence) -> bool {
        false
    }

    /// Whether the switch was requested and has not begun.
    fn is_awaited(&self) -> bool {
        false
    }

    /// How the guest leaves after the switch has begun; `None` before.
    fn switchover(&mut self) -> Option<&mut dyn Switchover> {
        None
    }

    /// Performs `SendPages`: sends pages until none is left.
    fn send_pages(&mut self, _transfer: &mut Transfer) -> Result<(), Break> {
        Err(is_off().into())
    }

    /// Performs `Recover`: learns which pages the destination has, and tells it to resume.
    fn recover(&mut self, _transfer: &mut Transfer) -> Result<(), Break> {
        Err(is_off().into())
    }

    /// Performs `ReportPaused`: the connection broke while the destination runs the guest.
    fn report_paused(&self, _cause: Cause) {}

    /// The session was lost before the switch, and another may follow.
    fn session_lost(&mut self) {}

    /// No channel is open any more.
    fn close(&mut self) {}
}

/// A migration without postcopy.
pub(in crate::outgoing) struct Off;

impl Postcopy for Off {}

fn is_off() -> MigrationError {
    MigrationError::Internal("an action of postcopy, which is off".to_owned())
}
