//! Devices of the kernel's VFIO: migration version 2 by ioctls on the device's descriptor.
//!
//! # The model
//! [`KernelPort`] is a [`MigrationPort`] for the descriptor of an opened VFIO device. It uses one ioctl,
//! VFIO_DEVICE_FEATURE. Its argument is a head (size, flags with the feature's number) and the feature's
//! data. The device's state is read from and written to a separate descriptor, the *data descriptor*, which
//! the kernel returns when a session begins:
//!
//! ```text
//!   RUNNING → PRE_COPY, STOP → STOP_COPY     a descriptor to read
//!   PRE_COPY → PRE_COPY_P2P → STOP_COPY      the same descriptor
//!   STOP → RESUMING                          a descriptor to write
//!   out of these states                      the descriptor is closed
//! ```
//!
//! A change that fails may leave the device in any state on the path, or in ERROR. The port then reads the
//! state, closes the data descriptor if its session is over, and reports both. The port never resets a device
//! by itself, because a reset loses the device's state. [`super::VfioDevice`] and its caller decide about
//! resets.
//!
//! The device's driver answers the kernel, so a call takes as long as the driver does. The port cannot
//! abandon a call and never returns [`PortError::Silent`]. Drivers are expected to have their own time
//! limits. With a driver without a limit, the call and its waiting thread may never end.
//!
//! [`Calls`] is the trait of the system calls, and [`System`] performs them. [`super::DmaLog`] over a port
//! reports the device's writes.

mod argument;
mod calls;
mod data_session;
mod log;
mod system;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::OwnedFd;

use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;

pub use calls::Calls;
pub use system::System;

use super::{MigState, MigrationFeatures, MigrationPort, PortError, PrecopyInfo, feature};
use argument::Argument;
use data_session::Session;

/// A migration port for a device of the kernel's VFIO.
#[derive(Debug)]
pub struct KernelPort<C: Calls = System> {
    name: String,
    calls: C,
    features: MigrationFeatures,
    tells_size: bool,
    logs_dma: bool,
    session: Mutex<Session<C::Data>>,
}

impl KernelPort {
    /// Opens the VFIO device of the descriptor `device`. The descriptor is from VFIO_GROUP_GET_DEVICE_FD, or
    /// of /dev/vfio/devices/vfioN bound to an IOMMU. `name` is the device's name in messages, such as its PCI
    /// address.
    ///
    /// # Errors
    /// [`PortError::Unsupported`] if the device's driver cannot migrate it. Also if the kernel refuses a
    /// call.
    pub fn open(device: OwnedFd, name: impl Into<String>) -> Result<Self, PortError> {
        Self::over(System::new(device), name)
    }
}

impl<C: Calls> KernelPort<C> {
    /// Like [`KernelPort::open`], with an implementation of the system calls.
    ///
    /// # Errors
    /// The same as for `open`.
    pub fn over(calls: C, name: impl Into<String>) -> Result<Self, PortError> {
        let none = MigrationFeatures::default();
        let session = Mutex::new(Session::at(MigState::Error));
        let (tells_size, logs_dma) = (false, false);
        let mut port = Self { name: name.into(), calls, features: none, tells_size, logs_dma, session };
        port.features = port.ask_features()?;
        port.tells_size = port.probe("MIG_DATA_SIZE", feature::GET, feature::MIG_DATA_SIZE)?;
        port.logs_dma = port.probe("DMA_LOGGING_START", feature::SET, feature::DMA_LOGGING_START)?;
        port.state()?;
        Ok(port)
    }

    /// Whether the device can log its DMA writes. If not, all memory that it can reach counts as written.
    pub fn logs_dma(&self) -> bool {
        self.logs_dma
    }

    fn ask_features(&self) -> Result<MigrationFeatures, PortError> {
        let request = "MIGRATION";
        let lack = || PortError::Unsupported {
            request,
            lack: format!(
                "the driver of {} cannot migrate it; bind the vendor's vfio driver to it",
                self.name
            ),
        };
        let mut argument = Argument::new(feature::GET, feature::MIGRATION, &[0]);
        match self.calls.feature(&mut argument.bytes, &mut []) {
            Ok(_) => MigrationFeatures::from_flags(argument.word(0)).ok_or_else(lack),
            Err(Errno::NOTTY) => Err(lack()),
            Err(errno) => Err(refused(request, errno)),
        }
    }

    fn probe(&self, request: &'static str, method: u32, feature: u16) -> Result<bool, PortError> {
        let mut argument = Argument::new(feature::PROBE | method, feature, &[]);
        match self.calls.feature(&mut argument.bytes, &mut []) {
            Ok(_) => Ok(true),
            // The feature exists, but not with this method.
            Err(Errno::NOTTY | Errno::INVAL) => Ok(false),
            Err(errno) => Err(refused(request, errno)),
        }
    }

    /// Reads the device's state, and closes the descriptor of a session that is over.
    fn ask_state(&self, session: &mut Session<C::Data>) -> Result<MigState, PortError> {
        let request = "MIG_DEVICE_STATE";
        let mut argument = Argument::state(feature::GET, 0);
        self.calls.feature(&mut argument.bytes, &mut []).map_err(|errno| refused(request, errno))?;
        let number = argument.state_number();
        let state = MigState::from_number(number)
            .ok_or_else(|| misbehaved(request, format!("state {number}, which does not exist")))?;
        session.found(state);
        Ok(state)
    }

    fn session(&self) -> MutexGuard<'_, Session<C::Data>> {
        self.session.lock()
    }
}

impl<C: Calls> MigrationPort for KernelPort<C> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn features(&self) -> MigrationFeatures {
        self.features
    }

    fn state(&self) -> Result<MigState, PortError> {
        self.ask_state(&mut self.session())
    }

    fn set_state(&self, to: MigState) -> Result<(), PortError> {
        let request = "MIG_DEVICE_STATE";
        let mut session = self.session();
        let mut argument = Argument::state(feature::SET, to.number());
        match self.calls.feature(&mut argument.bytes, &mut []) {
            Ok(data) => session.went(to, data).map_err(|rule| misbehaved(request, rule)),
            Err(errno) => {
                let whither = match self.ask_state(&mut session) {
                    Ok(MigState::Error) => "it is now in ERROR; only a reset repairs it".to_owned(),
                    Ok(state) => format!("it is now in {state}"),
                    Err(error) => format!("its current state is unknown: {error}"),
                };
                let why = io::Error::from(errno);
                let source = io::Error::new(why.kind(), format!("{why}; {whither}"));
                Err(PortError::Refused { request, source })
            }
        }
    }

    fn reset(&self) -> Result<(), PortError> {
        let request = "VFIO_DEVICE_RESET";
        let mut session = self.session();
        match self.calls.reset() {
            Ok(()) => {}
            Err(Errno::NOTTY | Errno::INVAL) => {
                let lack = format!("{} cannot be reset; detach it", self.name);
                return Err(PortError::Unsupported { request, lack });
            }
            Err(errno) => return Err(refused(request, errno)),
        }
        match self.ask_state(&mut session)? {
            MigState::Running => Ok(()),
            state => Err(misbehaved(request, format!("after the reset it is in {state}, not in RUNNING"))),
        }
    }

    fn read_data(&self, to: &mut [u8]) -> Result<usize, PortError> {
        let request = "reading its state";
        let session = self.session();
        let data = session.data(request)?;
        loop {
            return match self.calls.read(data, to) {
                Ok(read) if read > to.len() => {
                    Err(misbehaved(request, "it returned more than was requested"))
                }
                Ok(read) => Ok(read),
                Err(Errno::INTR) => continue,
                // While the device runs, there is no data now, and perhaps more later. After it has stopped,
                // 0 bytes mark the end.
                Err(Errno::NOMSG) if session.state().runs() => Ok(0),
                Err(errno) => Err(lost(request, errno)),
            };
        }
    }

    fn write_data(&self, mut from: &[u8]) -> Result<(), PortError> {
        let request = "writing its state";
        let session = self.session();
        let data = session.data(request)?;
        while !from.is_empty() {
            match self.calls.write(data, from) {
                Ok(0) => {
                    return Err(PortError::Gone { request, source: io::ErrorKind::WriteZero.into() });
                }
                Ok(written) if written > from.len() => {
                    return Err(misbehaved(request, "it accepted more than was written"));
                }
                Ok(written) => from = &from[written..],
                Err(Errno::INTR) => {}
                Err(errno) => return Err(lost(request, errno)),
            }
        }
        Ok(())
    }

    fn precopy_info(&self) -> Result<Option<PrecopyInfo>, PortError> {
        let request = "VFIO_MIG_GET_PRECOPY_INFO";
        let session = self.session();
        let data = session.data(request)?;
        let mut argument = argument::precopy_info();
        match self.calls.precopy_info(data, &mut argument) {
            Ok(()) => Ok(Some(argument::precopy_sizes(&argument))),
            Err(Errno::NOTTY) => Ok(None),
            Err(errno) => Err(lost(request, errno)),
        }
    }

    fn data_size(&self) -> Result<u64, PortError> {
        if !self.tells_size {
            return Ok(0);
        }
        let mut argument = Argument::new(feature::GET, feature::MIG_DATA_SIZE, &[0]);
        match self.calls.feature(&mut argument.bytes, &mut []) {
            Ok(_) => Ok(argument.word(0)),
            Err(errno) => Err(refused("MIG_DATA_SIZE", errno)),
        }
    }
}

fn refused(request: &'static str, errno: Errno) -> PortError {
    match errno {
        Errno::NODEV | Errno::NXIO => PortError::Gone { request, source: errno.into() },
        _ => PortError::Refused { request, source: errno.into() },
    }
}

/// Like [`refused`], for the data descriptor, whose session may have ended.
fn lost(request: &'static str, errno: Errno) -> PortError {
    match errno {
        Errno::PIPE => PortError::Gone { request, source: errno.into() },
        _ => refused(request, errno),
    }
}

fn misbehaved(request: &'static str, rule: impl Into<String>) -> PortError {
    PortError::Misbehaved { request, source: rule.into().into() }
}
