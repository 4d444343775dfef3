//! What goes wrong with a device that others run: who did not do what, in which state.

use std::io;
use std::time::Duration;

use sterna::VmError;

use super::state::MigState;

/// The device's other side (a process, the kernel) did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// It did not answer in time. It may be slow or hang; whether it did what was asked is not known.
    #[error("{request}: no answer within {limit:?}; check the device's process")]
    Silent {
        /// What was asked.
        request: &'static str,
        /// How long was waited.
        limit: Duration,
    },
    /// It is not there any more.
    #[error("{request}: the device is gone ({source}); it or its process may have died")]
    Gone {
        /// What was asked.
        request: &'static str,
        /// What the connection said.
        source: io::Error,
    },
    /// It answered that it will not or cannot.
    #[error("{request}: the device refuses: {source}")]
    Refused {
        /// What was asked.
        request: &'static str,
        /// Its reason.
        source: io::Error,
    },
    /// Its answer breaks the protocol.
    #[error("{request}: the device's other side misbehaves: {source}")]
    Misbehaved {
        /// What was asked.
        request: &'static str,
        /// Which byte of which message breaks which rule.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The device lacks what is needed.
    #[error("{request}: {lack}")]
    Unsupported {
        /// What was asked.
        request: &'static str,
        /// What it lacks.
        lack: String,
    },
    /// This machine could not do its part.
    #[error("{request}: {call} failed: {source}")]
    System {
        /// What was asked.
        request: &'static str,
        /// The system call.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// A device could not be saved, loaded or run. Names the device, and the state that it was last known to be in.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// Its other side failed.
    #[error("device {device} in state {state}: {source}")]
    Port {
        /// The device.
        device: String,
        /// Where it was.
        state: MigState,
        /// What its other side did.
        source: PortError,
    },
    /// A change of state failed.
    #[error("device {device} in state {state}: going to {to} failed: {source}")]
    Change {
        /// The device.
        device: String,
        /// Where it was.
        state: MigState,
        /// Where it should have gone.
        to: MigState,
        /// What its other side did.
        source: PortError,
    },
    /// What was asked does not fit the state that the device is in.
    #[error("device {device} in state {state}: {rule}")]
    State {
        /// The device.
        device: String,
        /// Where it is.
        state: MigState,
        /// Why it cannot be.
        rule: &'static str,
    },
    /// The peer sent configuration for a device that has none.
    #[error("device {device} in state {state}: {bytes} bytes of configuration came, but it has none")]
    Configuration {
        /// The device.
        device: String,
        /// Where it is.
        state: MigState,
        /// How many came.
        bytes: usize,
    },
}

impl DeviceError {
    /// The device that it is about.
    pub fn device(&self) -> &str {
        match self {
            DeviceError::Port { device, .. }
            | DeviceError::Change { device, .. }
            | DeviceError::State { device, .. }
            | DeviceError::Configuration { device, .. } => device,
        }
    }

    /// The state that it was last known to be in.
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
            DeviceError::Change { to, source, .. } => format!("going to {to} failed: {source}"),
            DeviceError::State { rule, .. } => (*rule).to_owned(),
            DeviceError::Configuration { bytes, .. } => {
                format!("{bytes} bytes of configuration came, but it has none")
            }
        };
        VmError::new(what, why)
    }
}
