//! Undoes changes to the guest, and turns a panic into a failure of its action.

use sterna_proto::source::{Action, Event as Fed};

use super::Control;
use crate::error::MigrationError;
use crate::events::Event;
use crate::threads::call;

impl Control {
    /// Reports an action that panicked to the machine as failed, to undo the changes.
    ///
    /// It is unknown how far the action came. Each answer is therefore the one that is right if the action came
    /// far.
    pub(super) fn panicked(&mut self, action: Action, error: MigrationError) {
        let event = match (action, self.transfer.guest.stopping.take()) {
            (Action::StopGuest, Some(was_running)) => {
                // The error must be known before, because otherwise the machine would continue and release hooks.
                self.shared.fail(error);
                return self.shared.report(Fed::GuestStopped { was_running });
            }
            (Action::StopGuest, None) => Fed::GuestStopFailed,
            (Action::ReleaseHooks, _) => Fed::HookReleaseFailed,
            (Action::SendEof | Action::SendRun, _) => Fed::EofFailed,
            (Action::AskAgain, _) => Fed::AskFailed,
            (Action::ReacquireHooks, _) => Fed::HooksReacquireFailed,
            (Action::ResumeGuest, _) => Fed::GuestResumeFailed,
            (Action::StopTracking, _) => Fed::TrackingStopFailed,
            (Action::Reconnect, _) => Fed::ReconnectFailed,
            (
                Action::ReportUndecided(_)
                | Action::ReportPaused(_)
                | Action::CloseChannels
                | Action::BreakOff
                | Action::Finish(_),
                _,
            ) => {
                self.shared.tell(&Event::Warning(error.to_string()));
                if action == Action::CloseChannels {
                    self.shared.report(Fed::ChannelsClosed);
                }
                return;
            }
            _ => return self.shared.fail(error),
        };
        let is_undoing =
            matches!(action, Action::ReacquireHooks | Action::ResumeGuest | Action::StopTracking);
        if is_undoing {
            self.shared.tell(&Event::Warning(error.to_string()));
            if action == Action::ResumeGuest {
                self.transfer.guest.not_resumed = Some(error);
            }
        } else {
            self.shared.note_error(error);
        }
        self.shared.report(event);
    }

    pub(super) fn reacquire_hooks(&mut self) {
        loop {
            // The hook counts as released until it is certainly acquired again.
            let Some(hook) = self.shared.handover.released.lock().last().cloned() else { break };
            let name = hook.name();
            if let Err(error) = call(format!("Hook::take_back of {name}"), || hook.take_back()) {
                tracing::warn!(hook = name, %error, "cannot acquire a hook again");
                self.shared.tell(&Event::Warning(format!("{name} is not acquired again yet: {error}")));
                self.shared.report(Fed::HooksReacquireFailed);
                return;
            }
            self.shared.handover.released.lock().pop();
        }
        self.shared.report(Fed::HooksReacquired);
    }

    pub(super) fn resume_guest(&mut self) {
        self.transfer.unthrottle();
        self.shared.run_devices();
        self.shared.measures.statistics.lock().stands_no_more();
        match call("SourceVm::resume", || self.shared.guest.vm.resume()) {
            Ok(()) => {
                self.shared.tell(&Event::Resumed);
                self.shared.report(Fed::GuestResumed);
            }
            Err(error) => {
                self.shared.tell(&Event::Warning(error.to_string()));
                self.transfer.guest.not_resumed = Some(error.into());
                self.shared.report(Fed::GuestResumeFailed);
            }
        }
    }

    pub(super) fn stop_tracking(&mut self) {
        self.transfer.unthrottle();
        match call("DirtySource::stop", || self.shared.guest.vm.dirty_source().stop()) {
            Ok(()) => self.shared.report(Fed::TrackingStopped),
            Err(error) => {
                self.shared.tell(&Event::Warning(error.to_string()));
                self.shared.report(Fed::TrackingStopFailed);
            }
        }
    }
}
