//! The device's state as the engine's stream.

use parking_lot::MutexGuard;
use sterna::{DeviceStream, RemainingState, VmError};

use super::configuration::Configuration;
use super::device::VhostUserDevice;
use super::error::{StateDirection, VhostUserError};
use super::pipe::{self, StatePipe};
use super::session::Session;
use super::transfer::Transfer;

impl DeviceStream for VhostUserDevice {
    fn begin_save(&self) -> Result<(), VmError> {
        let mut transfer = self.transfer();
        if transfer.is_load_under_way() {
            return Err(self.out_of_order("begin_save", &transfer).into());
        }
        let link = self.link()?;
        self.check_alive()?;
        self.abort_save(&mut transfer);
        // Whatever process it came from, or was given to in vain, has let go of it.
        link.worker.set_shared(false);
        self.speak();
        *transfer = Transfer::Announced;
        Ok(())
    }

    fn begin_hand_over(&self) -> Result<(), VmError> {
        if !self.is_shared() {
            return self.begin_save();
        }
        let mut transfer = self.transfer();
        if transfer.is_load_under_way() {
            return Err(self.out_of_order("begin_hand_over", &transfer).into());
        }
        self.check_alive()?;
        self.abort_save(&mut transfer);
        self.speak();
        *transfer = Transfer::HandingOver;
        Ok(())
    }

    fn remaining(&self) -> Result<RemainingState, VmError> {
        let expected = self.options.expected_state_bytes;
        let transfer = self.transfer();
        let stopped_bytes = match &*transfer {
            Transfer::Interrupted => return Err(self.out_of_order("remaining", &transfer).into()),
            Transfer::Announced => expected,
            Transfer::Saving { pipe, bytes } => expected.saturating_sub(*bytes).max(pipe.readable()),
            _ => 0,
        };
        Ok(RemainingState { stopped_bytes, ..RemainingState::default() })
    }

    fn read(&self, to: &mut [u8]) -> Result<usize, VmError> {
        let mut transfer = self.transfer();
        match &mut *transfer {
            Transfer::Announced | Transfer::HandingOver | Transfer::Saved => return Ok(0),
            Transfer::Saving { pipe, bytes } => {
                let n = pipe.read(to)?;
                *bytes += n as u64;
                if n > 0 || to.is_empty() {
                    return Ok(n);
                }
            }
            _ => return Err(self.out_of_order("read", &transfer).into()),
        }
        // The back end has closed the pipe: because it is through, or because it failed.
        *transfer = Transfer::Unsaved;
        self.call_session(|session| session.check(StateDirection::Save))?;
        *transfer = Transfer::Saved;
        Ok(0)
    }

    fn stop(&self) -> Result<(), VmError> {
        let mut transfer = self.transfer();
        if self.link().is_err() {
            // Another process has it.
            return Ok(());
        }
        if let Transfer::Ran { stopped } = &mut *transfer {
            *stopped = true;
        }
        let hands_over = matches!(*transfer, Transfer::HandingOver);
        self.call_session(move |session| {
            session.stop()?;
            if hands_over { session.fall_silent() } else { Ok(()) }
        })?;
        if hands_over || matches!(*transfer, Transfer::Announced) && !self.has_state() {
            *transfer = Transfer::Saved;
        } else if matches!(*transfer, Transfer::Announced) {
            // A back end that does not answer in time may begin all the same.
            *transfer = Transfer::Unsaved;
            let begun = self.begin_transfer(StateDirection::Save);
            let pipe = begun.inspect_err(|_| self.forget_save())?;
            *transfer = Transfer::Saving { pipe, bytes: 0 };
        }
        Ok(())
    }

    fn configuration(&self) -> Result<Vec<u8>, VmError> {
        Ok(self.call_session(|session| session.configuration())?.encode())
    }

    fn end_save(&self) -> Result<(), VmError> {
        let mut transfer = self.transfer();
        self.abort_save(&mut transfer);
        if transfer.is_save() {
            *transfer = Transfer::None;
        }
        Ok(())
    }

    fn begin_load(&self) -> Result<(), VmError> {
        let mut transfer = self.transfer();
        if !matches!(*transfer, Transfer::None | Transfer::Ran { .. }) {
            return Err(self.out_of_order("begin_load", &transfer).into());
        }
        if self.is_awaited() {
            // It comes with its state, and may not be here yet.
            *transfer = Transfer::LoadingNothing;
            return Ok(());
        }
        if !self.has_state() {
            self.call_session(|session| session.check_stopped("moving its state"))?;
            *transfer = Transfer::LoadingNothing;
            return Ok(());
        }
        let begun = self.begin_transfer(StateDirection::Load);
        let pipe = begun.inspect_err(|error| {
            // As with a save. But a device that runs was told nothing, and must not be reset.
            if !matches!(error, VhostUserError::OutOfOrder { .. }) {
                *transfer = Transfer::None;
                self.forget_load(false);
            }
        })?;
        *transfer = Transfer::Loading(pipe);
        Ok(())
    }

    fn write(&self, bytes: &[u8]) -> Result<(), VmError> {
        let mut transfer = self.transfer();
        match &mut *transfer {
            Transfer::Loading(pipe) => Ok(pipe.write(bytes)?),
            Transfer::LoadingNothing if bytes.is_empty() => Ok(()),
            Transfer::LoadingNothing if self.is_awaited() => {
                let rule = "the source sends a state of it, which it has itself".to_owned();
                Err(VhostUserError::NotTaken { device: self.name.clone(), rule }.into())
            }
            Transfer::LoadingNothing => {
                let feature =
                    "VHOST_USER_PROTOCOL_F_DEVICE_STATE, and the source's back end has a state".to_owned();
                Err(VhostUserError::Lacks { device: self.name.clone(), feature }.into())
            }
            _ => Err(self.out_of_order("write", &transfer).into()),
        }
    }

    fn finish_load(&self, configuration: &[u8]) -> Result<(), VmError> {
        let mut transfer = self.transfer();
        match *transfer {
            Transfer::LoadingNothing => self.check_alive()?,
            Transfer::Loading(_) => {
                // Closes the pipe: the back end's sign that it has all.
                *transfer = Transfer::Unchecked;
                self.call_session(|session| session.check(StateDirection::Load))?;
            }
            _ => return Err(self.out_of_order("finish_load", &transfer).into()),
        }
        let configuration = Configuration::decode(&self.name, configuration)?;
        self.call_session(move |session| session.adopt(&configuration))?;
        *transfer = Transfer::Loaded;
        Ok(())
    }

    fn end_load(&self) -> Result<(), VmError> {
        let mut transfer = self.transfer();
        // One that runs what was loaded keeps it.
        let was_checked = match *transfer {
            Transfer::Loading(_) | Transfer::Unchecked => false,
            Transfer::LoadingNothing | Transfer::Loaded | Transfer::Ran { stopped: true } => true,
            _ => return Ok(()),
        };
        *transfer = Transfer::None;
        self.forget_load(was_checked);
        Ok(())
    }

    fn run(&self) -> Result<(), VmError> {
        let mut transfer = self.transfer();
        match *transfer {
            Transfer::Loading(_) | Transfer::LoadingNothing | Transfer::Unchecked => {
                return Err(self.out_of_order("run", &transfer).into());
            }
            Transfer::Loaded | Transfer::Ran { .. } => {
                self.speak();
                self.call_session(|session| session.run())?;
                *transfer = Transfer::Ran { stopped: false };
                return Ok(());
            }
            _ => {}
        }
        self.abort_save(&mut transfer);
        self.speak();
        // By an operator: whoever undoes a save ends it first. One that is only announced has lost nothing.
        if matches!(*transfer, Transfer::Unsaved | Transfer::Saved) {
            *transfer = Transfer::Interrupted;
        }
        Ok(self.call_session(|session| session.run())?)
    }

    fn expected_bytes_per_second(&self) -> Option<u64> {
        self.options.expected_bytes_per_second
    }
}

impl VhostUserDevice {
    fn transfer(&self) -> MutexGuard<'_, Transfer> {
        self.transfer.lock()
    }

    fn out_of_order(&self, call: &'static str, transfer: &Transfer) -> VhostUserError {
        VhostUserError::OutOfOrder { device: self.name.clone(), call, state: transfer.describe() }
    }

    fn begin_transfer(&self, direction: StateDirection) -> Result<StatePipe, VhostUserError> {
        let limit = self.options.state_limit;
        let (ours, theirs) = pipe::pair(&self.name, direction, limit)?;
        match self.call_session(move |session| session.transfer(direction, theirs))? {
            None => Ok(ours),
            Some(file) => StatePipe::over(&self.name, direction, limit, file),
        }
    }

    /// Ends a save that is not through: closes the pipe, and lets the back end notice. A save that never began or
    /// was ended stays as it is.
    fn abort_save(&self, transfer: &mut Transfer) {
        if !matches!(transfer, Transfer::Saving { .. }) {
            return;
        }
        *transfer = Transfer::Unsaved;
        self.forget_save();
    }

    /// Lets the back end get over a save that is not wanted. Not waited for: whatever comes next is done after it.
    fn forget_save(&self) {
        // The answer is known, but it must come before the rings may run again.
        self.tell_session(|session| drop(session.check(StateDirection::Save)));
    }

    /// Lets the back end get over a load that is not wanted, as [`Self::forget_save`].
    fn forget_load(&self, was_checked: bool) {
        if self.is_shared() {
            // Nothing was loaded into it, and the source may go on with it.
            return self.tell_session(Session::forget);
        }
        self.tell_session(move |session| {
            if !was_checked {
                // Half a state is not good: the answer is known. The back end must be through with it, though.
                let _ = session.check(StateDirection::Load);
            }
            if let Err(error) = session.reset() {
                tracing::warn!(%error, "a back end could not be reset; restart it before the next migration");
            }
        });
    }
}
