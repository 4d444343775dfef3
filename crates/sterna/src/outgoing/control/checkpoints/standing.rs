//! How the guest is stopped for checkpoints, and goes on.

use sterna_proto::source::Event as Fed;

use crate::error::VmError;
use crate::events::Event;
use crate::outgoing::protection::{Protecting, Withholder};
use crate::outgoing::shared::Shared;
use crate::threads::{call, caught};
use crate::vm::RunState;

impl Shared {
    /// Stops the guest, which no operator may let run from now on.
    pub(crate) fn withhold_guest(&self, protecting: &Protecting, who: Withholder) -> Result<(), VmError> {
        protecting.switch.withhold(who, || {
            // A short pause that is under way ends first.
            let runs = || call("SourceVm::run_state", || self.vm.run_state()) == RunState::Running;
            let was_running = self.ram.while_free(runs).unwrap_or(false);
            self.report(Fed::GuestWithheld { was_running });
            self.stop_vm(was_running).inspect_err(|_| self.report(Fed::GuestGivenBack))?;
            if was_running {
                self.tell(&Event::Stopped);
            }
            Ok(was_running)
        })
    }

    /// Lets it run again if it did before, unless somebody else withholds it.
    pub(crate) fn give_guest_back(&self, protecting: &Protecting, who: Withholder) -> Result<(), VmError> {
        protecting.switch.give_back(who, |was_running| {
            if was_running {
                self.resume_vm()?;
                self.tell(&Event::Resumed);
            }
            self.report(Fed::GuestGivenBack);
            Ok(())
        })
    }

    /// The guest ran, and could not be resumed: it is, when the protection ends with the guest here.
    pub(super) fn keep_standing(&self, protecting: &Protecting) {
        let stood = protecting.switch.withhold(Withholder::Checkpoint, || {
            self.report(Fed::GuestWithheld { was_running: true });
            Ok(true)
        });
        debug_assert!(stood.is_ok(), "nothing here fails");
    }

    /// A panic is an error here: the guest runs as before.
    pub(super) fn stop_vm(&self, was_running: bool) -> Result<(), VmError> {
        let stopped = caught("SourceVm::stop", || call("SourceVm::stop", || self.vm.stop()));
        stopped.unwrap_or_else(|panic| {
            if was_running && let Err(error) = self.resume_vm() {
                self.tell(&Event::Warning(format!("{error}, after {panic}")));
            }
            Err(VmError::new("SourceVm::stop", panic))
        })
    }

    pub(super) fn resume_vm(&self) -> Result<(), VmError> {
        caught("SourceVm::resume", || call("SourceVm::resume", || self.vm.resume()))
            .unwrap_or_else(|panic| Err(VmError::new("SourceVm::resume", panic)))
    }
}
