//! The interface to the engine that moves the guest. [`SternaEngine`](super::SternaEngine) implements it. Tests of the
//! monitor implement it with a scripted engine.

use std::sync::Arc;

use sterna::{
    Address, Capabilities, IncomingStatistics, LiveSave, LiveSaveOptions, Observer, Parameters, Recording,
    SettingsError, SourceVm, StartError, Statistics, Status, TargetVm,
};
use sterna_standby::{PrimaryOptions, StandbyOptions};
use sterna_transport::CancelFlag;

use super::protection::{Protection, ProtectionMeans};

/// The side that has the guest, by the operator's decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestAt {
    /// The source: it may resume.
    Source,
    /// The destination: the source stays stopped permanently.
    Destination,
}

/// Starts migrations. Errors are sentences for the operator, from [`StartError`]. The engine reports the guest's
/// custody through the VM's [`GuestRam::custody`](sterna::ram::GuestRam::custody).
pub trait Engine: Send + Sync {
    /// Starts an outgoing migration and returns immediately.
    ///
    /// # Errors
    /// [`StartError::Tracked`] only if no other reason exists: the caller then ends a measurement and tries again.
    fn start_outgoing(
        &self,
        vm: Arc<dyn SourceVm>,
        to: &Address,
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Outgoing>, StartError>;

    /// Listens for a migration. The socket is bound when this returns.
    ///
    /// # Errors
    /// The reason why the engine cannot listen.
    fn start_incoming(
        &self,
        vm: Arc<dyn TargetVm>,
        at: &Address,
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Receiving>, StartError>;

    /// Starts a live save and returns immediately.
    ///
    /// # Errors
    /// The reason why the guest cannot be saved while it runs.
    fn start_live_save(
        &self,
        vm: Arc<dyn SourceVm>,
        to: &Address,
        parameters: Parameters,
        options: LiveSaveOptions,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Outgoing>, StartError> {
        let (_, _, _, _, _) = (vm, to, parameters, options, observer);
        Err(SettingsError::CannotHoldWrites.into())
    }

    /// Protects a guest by the standby at `to`. Returns after the standby has sent its greeting. `generation`: of
    /// this protection.
    ///
    /// # Errors
    /// The reason why the guest is not protected.
    fn start_protected(
        &self,
        vm: Arc<dyn SourceVm>,
        to: &Address,
        protecting: Protecting,
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Outgoing>, String> {
        let (_, _, _, _, _, _) = (vm, to, protecting, parameters, capabilities, observer);
        Err("this engine does not support protection".to_owned())
    }

    /// Makes a VM the standby of a guest that arrives at `at`. The socket is bound when this returns.
    ///
    /// # Errors
    /// The reason why the VM cannot be the standby.
    fn start_standby(
        &self,
        vm: Arc<dyn TargetVm>,
        at: &Address,
        standby: (ProtectionMeans, StandbyOptions),
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Receiving>, String> {
        let (_, _, _, _, _, _) = (vm, at, standby, parameters, capabilities, observer);
        Err("this engine cannot be a standby".to_owned())
    }
}

/// The settings for protecting a guest.
pub struct Protecting {
    /// The VM's own settings and functions for a protection.
    pub means: ProtectionMeans,
    /// The times of checkpoints and their limits.
    pub options: PrimaryOptions,
    /// The generation of the protection.
    pub generation: u64,
    /// Cancels connecting to the standby.
    pub cancel: CancelFlag,
}

/// An outgoing migration.
pub trait Outgoing: Send + Sync {
    /// The status of the migration.
    fn status(&self) -> Status;
    /// The statistics of the migration.
    fn statistics(&self) -> Statistics;
    /// The inputs of its precopy policy. `None` until pages are sent.
    fn recording(&self) -> Option<Recording>;
    /// Cancels the migration. Refused after the commit.
    fn cancel(&self) -> Result<(), String>;
    /// Continues after the pause before the switchover.
    fn continue_switchover(&self) -> Result<(), String>;
    /// Switches to postcopy: the guest continues at the destination before its pages are there.
    fn start_postcopy(&self) -> Result<(), String> {
        Err("this engine has no postcopy".to_owned())
    }
    /// Continues a postcopy whose connection broke over another connection.
    fn resume(&self, to: &Address) -> Result<(), String> {
        Err(format!("this engine does not support a recovery of postcopy at {to}"))
    }
    /// Breaks the connection of a postcopy on purpose.
    fn pause(&self) -> Result<(), String> {
        Err("this engine does not support pausing a postcopy".to_owned())
    }
    /// Applies the parameters that may change during a migration.
    fn set_live(&self, parameters: &Parameters);
    /// Tries again to bring back a guest that is held because an earlier attempt failed.
    fn retry(&self) -> Result<(), String>;
    /// Resumes a guest that was saved to a file.
    fn resume_saved(&self) -> Result<(), String> {
        Err("the guest was not saved to a file".to_owned())
    }
    /// Ends an undecided handover by the operator's decision. `seen` is the status that the operator decided about, if
    /// known. The decision is refused in any other status.
    fn decide(&self, guest_at: GuestAt, seen: Option<Status>) -> Result<(), String>;
    /// The protection, if this migration is one.
    fn protection(&self) -> Option<&dyn Protection> {
        None
    }
    /// The live save, if this is one: the guest stays here.
    fn live_save(&self) -> Option<&LiveSave> {
        None
    }
}

/// The destination's side of a migration.
pub trait Receiving: Send + Sync {
    /// The address at which it listens.
    fn address(&self) -> Address;
    /// The status of the migration.
    fn status(&self) -> Status;
    /// Whether it still listens or loads, or holds its guest.
    fn is_waiting(&self) -> bool {
        !matches!(self.status(), Status::Cancelled | Status::Failed | Status::Completed)
    }
    /// The statistics of the migration.
    fn statistics(&self) -> IncomingStatistics;
    /// Cancels the migration. Refused after the commit, and without `force` while a guest is held.
    fn cancel(&self, force: bool) -> Result<(), String>;
    /// Sets whether the guest starts after its arrival, if it ran at the source. Returns false if it is too late,
    /// because everything is loaded.
    fn set_autostart(&self, on: bool) -> bool;
    /// Also listens at another address for the source of a guest that lacks pages.
    fn recover_at(&self, at: &Address) -> Result<(), String> {
        Err(format!("this engine does not support a recovery of postcopy at {at}"))
    }
    /// Breaks the connection of a postcopy on purpose.
    fn pause(&self) -> Result<(), String> {
        Err("this engine does not support pausing a postcopy".to_owned())
    }
    /// Starts a guest that is held.
    fn release(&self) -> Result<(), String>;
    /// The protection, if this VM is the standby of one.
    fn protection(&self) -> Option<&dyn Protection> {
        None
    }
}
