//! Adapts a device with VFIO's migration states to the engine's [`DeviceStream`].
//!
//! | engine | device |
//! | --- | --- |
//! | `begin_save` | RUNNING → PRE_COPY, if it has that |
//! | `quiesce` | → RUNNING_P2P or PRE_COPY_P2P, if it has those |
//! | `stop` | → STOP_COPY; without a save before it → STOP |
//! | `end_save` | STOP_COPY → STOP; PRE_COPY → RUNNING; PRE_COPY_P2P → RUNNING_P2P |
//! | `begin_load` | → RESUMING; out of RESUMING by STOP, and out of ERROR by a reset |
//! | `finish_load` | → STOP: the device checks the loaded state |
//! | `end_load` | reset, unless the device runs with the loaded state; if the reset fails, RESUMING → STOP |
//! | `run` | → RUNNING |
//!
//! After a failed change, the device's state is read again before the next change. A device that stopped on
//! its way is therefore brought back from there. A device that did not answer still gets the requests of
//! `end_save` and `run`, and executes them when it resumes.

use parking_lot::{Mutex, MutexGuard};
use sterna::{DeviceStream, RemainingState, VmError};

use super::arcs::path;
use super::error::{DeviceError, PortError};
use super::port::MigrationPort;
use super::state::MigState;

const INTERRUPTED: &str =
    "an operator's stop and cont interrupted the save, and the device has changed since: migrate again";

/// A device with a [`MigrationPort`] and large state that the engine migrates.
#[derive(Debug)]
pub struct VfioDevice<P> {
    port: P,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// The last known state.
    state: MigState,
    /// A call failed, so `state` may be wrong: read it before the next change.
    unsure: bool,
    /// The failed call timed out. Reading the state would time out as well.
    silent: bool,
    session: Session,
}

#[derive(Debug)]
enum Session {
    None,
    Saving(Saving),
    /// The device ran during a save. The bytes read before and after belong to different states.
    Interrupted,
    Loading {
        /// A write failed, so bytes are missing.
        failed: bool,
    },
    /// All bytes were written, and the device accepted the state.
    Loaded,
    /// The device ran with the loaded state, and no save has begun since.
    Ran {
        /// The device was stopped afterwards, so the load may still be undone.
        stopped: bool,
    },
}

#[derive(Debug, Default)]
struct Saving {
    /// A read failed, and its bytes are lost.
    failed: bool,
    /// The last read while the device ran returned no bytes.
    idle: bool,
    /// Smallest size since then. None of these bytes can be read before the stop; later growth perhaps can.
    idle_bytes: Option<u64>,
    /// Size of the state when it was first queried after the stop.
    stopped_bytes: Option<u64>,
    /// Bytes read since the stop.
    read_bytes: u64,
    /// All bytes were read.
    ended: bool,
}

impl<P: MigrationPort> VfioDevice<P> {
    /// Takes over the device behind `port`, in any state.
    ///
    /// # Errors
    /// [`DeviceError::Port`] if its state cannot be read.
    pub fn new(port: P) -> Result<Self, DeviceError> {
        let state = port.state().map_err(|source| DeviceError::Port {
            device: port.name(),
            state: MigState::Error,
            source,
        })?;
        Ok(Self {
            port,
            inner: Mutex::new(Inner { state, unsure: false, silent: false, session: Session::None }),
        })
    }

    /// The port through which the device is reached.
    pub fn port(&self) -> &P {
        &self.port
    }

    /// The last known state of the device.
    pub fn state(&self) -> MigState {
        self.inner.lock().state
    }

    fn begin_save(&self) -> Result<(), DeviceError> {
        let mut inner = self.known()?;
        // A save session whose end was lost cannot be continued. It is closed, and a new one begins.
        match inner.state {
            MigState::PreCopy | MigState::PreCopyP2p => self.change(&mut inner, MigState::Running)?,
            MigState::StopCopy => self.change(&mut inner, MigState::Stop)?,
            _ => {}
        }
        if inner.state == MigState::Running && self.port.features().pre_copy {
            self.change(&mut inner, MigState::PreCopy)?;
        }
        inner.session = Session::Saving(Saving::default());
        Ok(())
    }

    fn remaining(&self) -> Result<RemainingState, DeviceError> {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let saving = match &mut inner.session {
            Session::Saving(saving) => saving,
            Session::Interrupted => return Err(self.misused(inner.state, INTERRUPTED)),
            _ => return Ok(RemainingState::default()),
        };
        let failed = |source| self.failed(inner.state, source);
        let mut remaining = RemainingState::default();
        match inner.state {
            MigState::PreCopy | MigState::PreCopyP2p => {
                let info = self.port.precopy_info().map_err(failed)?;
                let size = self.port.data_size().map_err(failed)?;
                match info {
                    Some(info) => {
                        (remaining.initial_bytes, remaining.dirty_bytes) =
                            (info.initial_bytes, info.dirty_bytes);
                        remaining.stopped_bytes = size.saturating_sub(remaining.running_bytes());
                    }
                    // The device does not report what can be read now. Until a read returns nothing, count
                    // the whole size; then only its growth.
                    None if saving.idle => {
                        let rest = saving.idle_bytes.map_or(size, |bytes| bytes.min(size));
                        saving.idle_bytes = Some(rest);
                        (remaining.dirty_bytes, remaining.stopped_bytes) = (size - rest, rest);
                    }
                    None => remaining.dirty_bytes = size,
                }
            }
            MigState::StopCopy if saving.ended => {}
            MigState::StopCopy => {
                let all = match saving.stopped_bytes {
                    Some(bytes) => bytes,
                    None => *saving.stopped_bytes.insert(self.port.data_size().map_err(failed)?),
                };
                remaining.stopped_bytes = all.saturating_sub(saving.read_bytes);
            }
            _ => remaining.stopped_bytes = self.port.data_size().map_err(failed)?,
        }
        Ok(remaining)
    }

    fn read(&self, to: &mut [u8]) -> Result<usize, DeviceError> {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let state = inner.state;
        let saving = match &mut inner.session {
            Session::Saving(saving) => saving,
            Session::Interrupted => return Err(self.misused(state, INTERRUPTED)),
            _ => return Err(self.misused(state, "it is not being saved")),
        };
        if saving.failed {
            return Err(
                self.misused(state, "a read failed, so bytes are missing: save it from the beginning")
            );
        }
        if !state.saves() || saving.ended || to.is_empty() {
            return Ok(0);
        }
        match self.port.read_data(to) {
            Ok(read) => {
                if state == MigState::StopCopy {
                    saving.ended = read == 0;
                    saving.read_bytes = saving.read_bytes.saturating_add(read as u64);
                } else {
                    (saving.idle, saving.idle_bytes) = (read == 0, None);
                }
                Ok(read)
            }
            Err(source) => {
                saving.failed = true;
                inner.doubt(&source);
                Err(self.failed(state, source))
            }
        }
    }

    fn quiesce(&self) -> Result<(), DeviceError> {
        let mut inner = self.known()?;
        let to = match inner.state {
            MigState::Running => MigState::RunningP2p,
            MigState::PreCopy => MigState::PreCopyP2p,
            _ => return Ok(()),
        };
        if self.port.features().has(to) { self.change(&mut inner, to) } else { Ok(()) }
    }

    fn stop(&self) -> Result<(), DeviceError> {
        if let Session::Ran { stopped } = &mut self.inner.lock().session {
            *stopped = true;
        }
        let mut inner = self.known()?;
        let saving = matches!(inner.session, Session::Saving(_));
        self.change(&mut inner, if saving { MigState::StopCopy } else { MigState::Stop })
    }

    fn end_save(&self) -> Result<(), DeviceError> {
        let mut inner = self.inner.lock();
        if matches!(inner.session, Session::Saving(_) | Session::Interrupted) {
            // The session is over, even if the device cannot be brought back.
            inner.session = Session::None;
        } else if !inner.state.saves() && !inner.unsure {
            return Ok(());
        }
        self.look(&mut inner)?;
        let to = match inner.state {
            MigState::StopCopy => MigState::Stop,
            MigState::PreCopy => MigState::Running,
            MigState::PreCopyP2p => MigState::RunningP2p,
            state => state,
        };
        self.bring(&mut inner, to)
    }

    fn begin_load(&self) -> Result<(), DeviceError> {
        let mut inner = self.known()?;
        if inner.state == MigState::Resuming {
            // The end of an earlier load was lost. Its bytes must not precede those of this load.
            self.leave_load(&mut inner)?;
        }
        if inner.state == MigState::Error {
            self.reset(&mut inner)?;
        }
        self.change(&mut inner, MigState::Resuming)?;
        inner.session = Session::Loading { failed: false };
        Ok(())
    }

    /// Leaves RESUMING, whatever was written. A device may treat a partial state as a failure and enter
    /// ERROR.
    fn leave_load(&self, inner: &mut Inner) -> Result<(), DeviceError> {
        if let Session::Loading { failed } = &mut inner.session {
            *failed = true;
        }
        let left = self.change(inner, MigState::Stop);
        self.look(inner)?;
        if inner.state == MigState::Resuming { left } else { Ok(()) }
    }

    fn write(&self, bytes: &[u8]) -> Result<(), DeviceError> {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let state = inner.state;
        let Session::Loading { failed } = &mut inner.session else {
            return Err(self.misused(state, "it is not being loaded"));
        };
        if *failed {
            return Err(
                self.misused(state, "a write failed, so bytes are missing: load it from the beginning")
            );
        }
        if let Err(source) = self.port.write_data(bytes) {
            *failed = true;
            inner.doubt(&source);
            return Err(self.failed(state, source));
        }
        Ok(())
    }

    fn finish_load(&self, configuration: &[u8]) -> Result<(), DeviceError> {
        let mut inner = self.known()?;
        if !matches!(inner.session, Session::Loading { failed: false }) {
            return Err(self.misused(inner.state, "it was not loaded completely"));
        }
        if !configuration.is_empty() {
            return Err(DeviceError::Configuration {
                device: self.port.name(),
                state: inner.state,
                bytes: configuration.len(),
            });
        }
        self.change(&mut inner, MigState::Stop)?;
        inner.session = Session::Loaded;
        Ok(())
    }

    fn end_load(&self) -> Result<(), DeviceError> {
        let mut inner = self.inner.lock();
        if !matches!(
            inner.session,
            Session::Loading { .. } | Session::Loaded | Session::Ran { stopped: true }
        ) {
            return Ok(());
        }
        if let Err(error) = self.reset(&mut inner) {
            // At least no later write continues this load.
            if self.look(&mut inner).is_ok() && inner.state == MigState::Resuming && !inner.silent {
                let _ = self.leave_load(&mut inner);
            }
            return Err(error);
        }
        inner.session = Session::None;
        Ok(())
    }

    fn run(&self) -> Result<(), DeviceError> {
        let mut inner = self.inner.lock();
        if matches!(inner.session, Session::Loading { .. }) {
            return Err(self.misused(inner.state, "its load was not finished"));
        }
        self.look(&mut inner)?;
        self.bring(&mut inner, MigState::Running)?;
        inner.session = match inner.session {
            // The operator resumed the device. An undone save would have ended its session first.
            Session::Saving(_) | Session::Interrupted => Session::Interrupted,
            Session::Loaded | Session::Ran { .. } => Session::Ran { stopped: false },
            _ => Session::None,
        };
        Ok(())
    }

    /// Like [`Self::change`], but also sends the request to a device that did not answer. Such a device
    /// executes the request when it resumes, by the shortest path from its state.
    fn bring(&self, inner: &mut Inner, to: MigState) -> Result<(), DeviceError> {
        if inner.unsure && to != MigState::Error { self.set(inner, to) } else { self.change(inner, to) }
    }

    fn change(&self, inner: &mut Inner, to: MigState) -> Result<(), DeviceError> {
        let state = inner.state;
        if state == to {
            return Ok(());
        }
        if path(self.port.features(), state, to).is_none() {
            let rule = match state {
                MigState::Error => "it has failed; only a reset repairs it, and that loses its state",
                _ => "the required state cannot be reached from there",
            };
            return Err(self.misused(state, rule));
        }
        self.set(inner, to)
    }

    fn set(&self, inner: &mut Inner, to: MigState) -> Result<(), DeviceError> {
        let state = inner.state;
        match self.port.set_state(to) {
            Ok(()) => {
                (inner.state, inner.unsure, inner.silent) = (to, false, false);
                Ok(())
            }
            Err(source) => {
                inner.doubt(&source);
                Err(DeviceError::Change { device: self.port.name(), state, to, source })
            }
        }
    }

    fn reset(&self, inner: &mut Inner) -> Result<(), DeviceError> {
        if let Err(source) = self.port.reset() {
            inner.doubt(&source);
            return Err(self.failed(inner.state, source));
        }
        (inner.state, inner.unsure, inner.silent) = (MigState::Running, false, false);
        Ok(())
    }

    /// Locks the state and makes sure that it is known.
    fn known(&self) -> Result<MutexGuard<'_, Inner>, DeviceError> {
        let mut inner = self.inner.lock();
        inner.silent = false;
        self.look(&mut inner)?;
        Ok(inner)
    }

    /// Reads the state if it is uncertain, unless the device does not answer.
    fn look(&self, inner: &mut Inner) -> Result<(), DeviceError> {
        if !inner.unsure || inner.silent {
            return Ok(());
        }
        self.ask(inner)
    }

    fn ask(&self, inner: &mut Inner) -> Result<(), DeviceError> {
        match self.port.state() {
            Ok(state) => {
                (inner.state, inner.unsure) = (state, false);
                Ok(())
            }
            Err(source) => {
                inner.doubt(&source);
                Err(self.failed(inner.state, source))
            }
        }
    }

    fn failed(&self, state: MigState, source: PortError) -> DeviceError {
        DeviceError::Port { device: self.port.name(), state, source }
    }

    fn misused(&self, state: MigState, rule: &'static str) -> DeviceError {
        DeviceError::State { device: self.port.name(), state, rule }
    }
}

impl Inner {
    /// Records a failed call, after which the state is unknown.
    fn doubt(&mut self, source: &PortError) {
        self.unsure = true;
        self.silent = matches!(source, PortError::Silent { .. });
    }
}

impl<P: MigrationPort> DeviceStream for VfioDevice<P> {
    fn begin_save(&self) -> Result<(), VmError> {
        Ok(self.begin_save()?)
    }

    fn remaining(&self) -> Result<RemainingState, VmError> {
        Ok(self.remaining()?)
    }

    fn read(&self, to: &mut [u8]) -> Result<usize, VmError> {
        Ok(self.read(to)?)
    }

    fn quiesce(&self) -> Result<(), VmError> {
        Ok(self.quiesce()?)
    }

    fn stop(&self) -> Result<(), VmError> {
        Ok(self.stop()?)
    }

    fn end_save(&self) -> Result<(), VmError> {
        Ok(self.end_save()?)
    }

    fn begin_load(&self) -> Result<(), VmError> {
        Ok(self.begin_load()?)
    }

    fn write(&self, bytes: &[u8]) -> Result<(), VmError> {
        Ok(self.write(bytes)?)
    }

    fn finish_load(&self, configuration: &[u8]) -> Result<(), VmError> {
        Ok(self.finish_load(configuration)?)
    }

    fn end_load(&self) -> Result<(), VmError> {
        Ok(self.end_load()?)
    }

    fn check_run(&self) -> Result<(), VmError> {
        Ok(self.ask(&mut self.inner.lock())?)
    }

    fn run(&self) -> Result<(), VmError> {
        Ok(self.run()?)
    }

    fn expected_bytes_per_second(&self) -> Option<u64> {
        self.port.expected_bytes_per_second()
    }
}

#[cfg(test)]
mod tests;
