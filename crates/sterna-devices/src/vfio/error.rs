//! Errors of devices that other processes or the kernel run. Each names the device, its state and the failed
//! request.

use std::io;
use std::time::Duration;

use sterna::VmError;

use super::state::MigState;

/// A failure of the device's other side, which is a process or the kernel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// The other side did not answer in time. It may be slow or hang. Whether it has executed the request is
    /// unknown.
    #[error("{request}: no answer within {limit:?}; check the device's process")]
    Silent {
        /// Name of the request.
        request: &'static str,
        /// Time limit that was exceeded.
        limit: Duration,
    },
    /// The other side no longer exists.
    #[error(
        "{request}: the connection to the device is lost ({source}); the device or its process may have died"
    )]
    Gone {
        /// Name of the request.
        request: &'static str,
        /// Error of the connection to the device.
        source: io::Error,
    },
    /// The other side refused the request.
    #[error("{request}: the device refused the request: {source}")]
    Refused {
        /// Name of the request.
        request: &'static str,
        /// The other side's reason.
        source: io::Error,
    },
    /// The answer breaks the protocol.
    #[error("{request}: the device's process breaks the protocol: {source}")]
    Misbehaved {
        /// Name of the request.
        request: &'static str,
        /// The broken rule, with the message and the byte.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The device lacks a required feature.
    #[error("{request}: {lack}")]
    Unsupported {
        /// Name of the request.
        request: &'static str,
        /// The feature that the device lacks.
        lack: String,
    },
    /// A system call of this process failed.
    #[error("{request}: {call} failed: {source}")]
    System {
        /// Name of the request.
        request: &'static str,
        /// Name of the system call.
        call: &'static str,
        /// Error that the system call returned.
        source: io::Error,
    },
}

/// A failed save, load or start of a device. It names the device and its last known state.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device's other side failed.
    #[error("device {device} in state {state}: {source}")]
    Port {
        /// The device's name in messages.
        device: String,
        /// Its last known state.
        state: MigState,
        /// The other side's failure.
        source: PortError,
    },
    /// A change of the device's state failed.
    #[error("device {device} in state {state}: the change to {to} failed: {source}")]
    Change {
        /// The device's name in messages.
        device: String,
        /// State before the change.
        state: MigState,
        /// State that was requested.
        to: MigState,
        /// The other side's failure.
        source: PortError,
    },
    /// The request is not possible in the device's present state.
    #[error("device {device} in state {state}: {rule}")]
    State {
        /// The device's name in messages.
        device: String,
        /// The device's present migration state.
        state: MigState,
        /// Why the request is not possible.
        rule: &'static str,
    },
    /// The peer sent a configuration to a device that has none.
    #[error(
        "device {device} in state {state}: {bytes} bytes of configuration arrived, but the device has no \
             configuration"
    )]
    Configuration {
        /// The device's name in messages.
        device: String,
        /// The device's present migration state.
        state: MigState,
        /// Length of the configuration in bytes.
        bytes: usize,
    },
}

impl DeviceError {
    /// Name of the device that failed.
    pub fn device(&self) -> &str {
        match self {
            DeviceError::Port { device, .. }
            | DeviceError::Change { device, .. }
            | DeviceError::State { device, .. }
            | DeviceError::Configuration { device, .. } => device,
        }
    }

    /// The device's last known state.
    pub fn state(&self) -> MigState {
        match self {
            DeviceError::Port { state, .. }
            | DeviceError::Change { state, .. }
            | DeviceError::State { state, .. }
            | DeviceError::Configuration { state, .. } => *state,
        }
    }
}

impl From<DeviceError> for VmError {
    fn from(error: DeviceError) -> Self {
        let what = format!("device {} in state {}", error.device(), error.state());
        let why = match &error {
            DeviceError::Port { source, .. } => source.to_string(),
            DeviceError::Change { to, source, .. } => format!("the change to {to} failed: {source}"),
            DeviceError::State { rule, .. } => (*rule).to_owned(),
            DeviceError::Configuration { bytes, .. } => {
                format!("{bytes} bytes of configuration arrived, but the device has no configuration")
            }
        };
        VmError::new(what, why)
    }
}
