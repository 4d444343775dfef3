//! The seam to what moves the guest. [`SternaEngine`](super::SternaEngine) is the engine itself; tests of
//! the dialogue put a scripted one in its place.

use std::sync::Arc;

use sterna::replica::{PrimaryOptions, StandbyOptions};
use sterna::{
    Address, Capabilities, IncomingStatistics, Observer, Parameters, Recording, SourceVm, StartError,
    Statistics, Status, TargetVm,
};

use super::protection::{Protection, ProtectionMeans};

/// Which side has the guest, in the operator's judgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestAt {
    /// The source: it may resume.
    Source,
    /// The destination: the source stays stopped permanently.
    Destination,
}

/// Starts migrations. Errors are sentences for the operator, as [`StartError`] says them. Who has the guest meanwhile and
/// afterwards it says through the VM's [`GuestRam::custody`](sterna::ram::GuestRam::custody).
pub trait Engine: Send + Sync {
    /// Starts an outgoing migration and returns at once.
    ///
    /// # Errors
    /// [`StartError::Tracked`] only where nothing else keeps it from starting: a measurement is ended for it then.
    fn start_outgoing(
        &self,
        vm: Arc<dyn SourceVm>,
        to: &Address,
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Outgoing>, StartError>;

    /// Listens for a migration; bound when it returns.
    ///
    /// # Errors
    /// Why it cannot.
    fn start_incoming(
        &self,
        vm: Arc<dyn TargetVm>,
        at: &Address,
        parameters: Parameters,
        capabilities: Capabilities,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Receiving>, StartError>;

    /// Protects a guest by the standby at `to`, and returns when that was greeted. `generation`: that of the protection.
    ///
    /// # Errors
    /// Why it is not protected.
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
        Err("this engine protects no guest".to_owned())
    }

    /// Makes a VM the standby of a guest that comes to `at`; bound when it returns.
    ///
    /// # Errors
    /// Why it cannot.
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
        Err("this engine is no standby".to_owned())
    }
}

/// How a guest is protected.
pub struct Protecting {
    /// What its VM has for that.
    pub means: ProtectionMeans,
    /// When checkpoints come, and what they may take.
    pub options: PrimaryOptions,
    /// The protection's generation.
    pub generation: u64,
}

/// An outgoing migration.
pub trait Outgoing: Send + Sync {
    /// Where it stands.
    fn status(&self) -> Status;
    /// Its figures.
    fn statistics(&self) -> Statistics;
    /// What its precopy policy was told; `None` before pages move.
    fn recording(&self) -> Option<Recording>;
    /// Ends it; refused after the commit.
    fn cancel(&self) -> Result<(), String>;
    /// Goes on from the pause before the switchover.
    fn continue_switchover(&self) -> Result<(), String>;
    /// Lets the guest go on at the destination before its pages are there.
    fn start_postcopy(&self) -> Result<(), String> {
        Err("this engine has no postcopy".to_owned())
    }
    /// Goes on over another connection after that of a postcopy broke.
    fn resume(&self, to: &Address) -> Result<(), String> {
        Err(format!("this engine has no postcopy that could go on at {to}"))
    }
    /// Breaks the connection of a postcopy on purpose.
    fn pause(&self) -> Result<(), String> {
        Err("this engine has no postcopy that could be paused".to_owned())
    }
    /// Takes over the live ones of `parameters`.
    fn set_live(&self, parameters: &Parameters);
    /// Brings back a guest that is held stopped since bringing it back had failed.
    fn retry(&self) -> Result<(), String>;
    /// Lets a guest run again that was saved to a file.
    fn resume_saved(&self) -> Result<(), String> {
        Err("the guest was not saved to a file".to_owned())
    }
    /// Ends an undecided handover.
    fn decide(&self, guest_at: GuestAt) -> Result<(), String>;
    /// The protection that it is, if it is one.
    fn protection(&self) -> Option<&dyn Protection> {
        None
    }
}

/// A destination's side of a migration.
pub trait Receiving: Send + Sync {
    /// Where it listens.
    fn address(&self) -> Address;
    /// Where it stands.
    fn status(&self) -> Status;
    /// Whether it still listens, loads, or holds its guest.
    fn is_waiting(&self) -> bool {
        !matches!(self.status(), Status::Cancelled | Status::Failed | Status::Completed)
    }
    /// Its figures.
    fn statistics(&self) -> IncomingStatistics;
    /// Ends it; refused after the commit, and without `force` while a guest is held.
    fn cancel(&self, force: bool) -> Result<(), String>;
    /// Whether the guest starts when it has come, if it ran at the source. Returns whether it will be so: too
    /// late once everything is loaded.
    fn set_autostart(&self, on: bool) -> bool;
    /// Listens at another address, too, for the source of a guest that lacks pages.
    fn recover_at(&self, at: &Address) -> Result<(), String> {
        Err(format!("this engine has no postcopy that could go on at {at}"))
    }
    /// Breaks the connection of a postcopy on purpose.
    fn pause(&self) -> Result<(), String> {
        Err("this engine has no postcopy that could be paused".to_owned())
    }
    /// Starts a held guest.
    fn release(&self) -> Result<(), String>;
    /// The protection that this is the standby of, if it is one.
    fn protection(&self) -> Option<&dyn Protection> {
        None
    }
}
