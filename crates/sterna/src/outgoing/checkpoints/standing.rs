//! Stopping and resuming the guest for checkpoints.

use sterna_proto::source::Event as Fed;

use crate::error::VmError;
use crate::events::Event;
use crate::outgoing::protection::{Protecting, Withholder};
use crate::outgoing::shared::Shared;
use crate::threads::{call, caught};
use crate::vm::RunState;

impl Shared {
    /// Stops the guest. No operator may resume it from now on.
    pub(crate) fn withhold_guest(&self, protecting: &Protecting, who: Withholder) -> Result<(), VmError> {
        protecting.switch.withhold(who, || {
            // A short pause that is under way ends first. This runs as an act, so that no operator's act runs
            // between the check and the stop.
            let runs = || call("SourceVm::run_state", || self.guest.vm.run_state()) == RunState::Running;
            // Only after that pause is it known whether the pause has kept the guest stopped.
            let kept = || protecting.switch.take_kept();
            let withheld = self.guest.ram.while_free(|| self.stop_withheld(runs() | kept()));
            withheld.unwrap_or_else(|_| self.stop_withheld(kept()))
        })
    }

    /// Stops the guest and gives whether it ran.
    fn stop_withheld(&self, was_running: bool) -> Result<bool, VmError> {
        self.report(Fed::GuestWithheld { was_running });
        self.stop_vm(was_running).inspect_err(|_| self.report(Fed::GuestGivenBack))?;
        if was_running {
            self.tell(&Event::Stopped);
        }
        Ok(was_running)
    }

    /// Resumes the guest if it ran before, unless another part withholds it.
    ///
    /// The overseer may also refuse it.
    pub(crate) fn give_guest_back(&self, protecting: &Protecting, who: Withholder) -> Result<(), VmError> {
        // A checkpoint's pause may have lasted longer than the lease. The overseer itself gives back only a guest
        // that may run.
        if who == Withholder::Checkpoint {
            self.keep_for_overseer(protecting);
        }
        protecting.switch.give_back(who, |was_running| {
            if was_running {
                self.resume_vm()?;
                self.tell(&Event::Resumed);
            }
            self.report(Fed::GuestGivenBack);
            Ok(())
        })
    }

    /// Records that the guest ran and could not be resumed. The end of a protection that leaves it here resumes
    /// it.
    pub(super) fn keep_standing(&self, protecting: &Protecting) {
        let stood = protecting.switch.withhold(Withholder::Checkpoint, || {
            self.report(Fed::GuestWithheld { was_running: true });
            Ok(true)
        });
        debug_assert!(stood.is_ok(), "nothing here fails");
    }

    /// Keeps a stopped guest stopped, if the overseer does not let it run.
    ///
    /// The guest stays stopped until the overseer gives it back.
    ///
    /// The overseer's own order to stop the guest follows, and has nothing left to do.
    pub(super) fn keep_for_overseer(&self, protecting: &Protecting) {
        let kept = protecting.switch.keep_unless(
            || protecting.overseer.may_guest_run(),
            || {
                self.report(Fed::GuestWithheld { was_running: true });
                // An operator may have resumed the guest since the end of the pause.
                self.stop_vm(true).inspect_err(|_| self.report(Fed::GuestGivenBack))?;
                protecting.switch.take_kept();
                Ok(true)
            },
        );
        if let Err(error) = kept {
            // The overseer repeats its order until it is carried out.
            self.tell(&Event::Warning(format!(
                "the lease of the guest has ended: {error}; stopping it is tried again"
            )));
        }
    }

    /// Whether the guest's protection allows that a stopped guest is resumed here.
    fn may_resume(&self) -> bool {
        self.protecting.as_ref().is_none_or(|protecting| protecting.overseer.may_guest_run())
    }

    /// Stops the VM. A panic becomes an error: the guest then runs as before, if it may.
    pub(super) fn stop_vm(&self, was_running: bool) -> Result<(), VmError> {
        let stopped = caught("SourceVm::stop", || call("SourceVm::stop", || self.guest.vm.stop()));
        stopped.unwrap_or_else(|panic| {
            if was_running
                && self.may_resume()
                && let Err(error) = self.resume_vm()
            {
                self.tell(&Event::Warning(format!("{error}, after {panic}")));
            }
            Err(VmError::new("SourceVm::stop", panic))
        })
    }

    pub(super) fn resume_vm(&self) -> Result<(), VmError> {
        caught("SourceVm::resume", || call("SourceVm::resume", || self.guest.vm.resume()))
            .unwrap_or_else(|panic| Err(VmError::new("SourceVm::resume", panic)))
    }
}
