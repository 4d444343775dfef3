//! Implements the engine's [`DeviceStream`] for a vhost-user device.

use std::sync::Arc;

use parking_lot::MutexGuard;
use sterna::{DeviceStream, RemainingState, VmError};

use super::configuration::Configuration;
use super::device::VhostUserDevice;
use super::ended;
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
        // No other process uses the connection now: neither the one it came from, nor one of an earlier
        // failed handover.
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
        // The back end closed the pipe, because it has finished or because it failed.
        *transfer = Transfer::Unsaved;
        self.call_session(|session| session.check(StateDirection::Save))?;
        *transfer = Transfer::Saved;
        Ok(0)
    }

    fn stop(&self) -> Result<(), VmError> {
        let mut transfer = self.transfer();
        if self.link().is_err() {
            // Another process has the back end.
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
            // Set before the request, because a back end that does not answer in time may begin the transfer
            // nevertheless.
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
            // The back end keeps its state and is handed over; it may not have arrived yet.
            *transfer = Transfer::LoadingNothing;
            return Ok(());
        }
        if !self.has_state() {
            self.call_session(|session| session.check_stopped("transferring its state"))?;
            *transfer = Transfer::LoadingNothing;
            return Ok(());
        }
        let begun = self.begin_transfer(StateDirection::Load);
        let pipe = begun.inspect_err(|error| {
            // As with a save. A device that runs got no request, and must not be reset.
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
                let rule =
                    "the source sends a state for it, but the back end already has its state".to_owned();
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
                // Closes the pipe, which tells the back end that the state is complete.
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
        // A device that runs with the loaded state keeps it.
        let was_checked = match *transfer {
            Transfer::Loading(_) | Transfer::Unchecked => false,
            Transfer::LoadingNothing | Transfer::Loaded | Transfer::Ran { stopped: true } => true,
            _ => return Ok(()),
        };
        *transfer = Transfer::None;
        self.forget_load(was_checked);
        Ok(())
    }

    fn check_run(&self) -> Result<(), VmError> {
        match ended::has_come(&self.link()?.socket) {
            true => Err(VhostUserError::Gone {
                device: Arc::clone(&self.name),
                request: "the check before it runs",
            }
            .into()),
            false => Ok(()),
        }
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
        // The operator resumed the device. An undone save would have ended first. A save that was only
        // announced has lost nothing.
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

    /// Aborts an unfinished save: closes the pipe, and lets the back end notice it. A save that never began
    /// or has ended is unchanged.
    fn abort_save(&self, transfer: &mut Transfer) {
        if !matches!(transfer, Transfer::Saving { .. }) {
            return;
        }
        *transfer = Transfer::Unsaved;
        self.forget_save();
    }

    /// Lets the back end finish an unwanted save, without waiting. Later requests are executed after it.
    fn forget_save(&self) {
        // The answer is known to be a failure, but it must arrive before the rings may run again.
        self.tell_session(|session| drop(session.check(StateDirection::Save)));
    }

    /// Lets the back end finish an unwanted load, like [`Self::forget_save`].
    fn forget_load(&self, was_checked: bool) {
        if self.is_shared() {
            // Nothing was loaded into this back end, and the source may continue to use it.
            return self.tell_session(Session::forget);
        }
        self.tell_session(move |session| {
            if !was_checked {
                // A partial state is known to be refused, but the back end must have finished with it.
                let _ = session.check(StateDirection::Load);
            }
            if let Err(error) = session.reset() {
                tracing::warn!(%error, "a back end could not be reset; restart it before the next migration");
            }
        });
    }
}
