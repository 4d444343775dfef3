//! Errors of vhost-user back ends. Every error names the device.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sterna::VmError;
use vhost::vhost_user::Error as ProtocolError;

/// Direction in which a back end's state moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateDirection {
    /// Out of the back end.
    Save,
    /// Into the back end.
    Load,
}

impl fmt::Display for StateDirection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Save => "saving",
            Self::Load => "loading",
        })
    }
}

/// A failure of a vhost-user device or of its back end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VhostUserError {
    /// No back end listens at the socket, or it does not accept in time.
    #[error("vhost-user device {device}: cannot connect to {}: {source}; check that its back end is running", socket.display())]
    Connect {
        /// Name of the device.
        device: Arc<str>,
        /// Path of the back end's socket.
        socket: PathBuf,
        /// Error that the system call returned.
        source: io::Error,
    },
    /// The back end did not answer in time. It may answer later, so the connection stays open.
    #[error(
        "vhost-user device {device}: the back end did not answer {request} within {limit:?}; check that its process \
         is not stopped"
    )]
    NoAnswer {
        /// Name of the device.
        device: Arc<str>,
        /// Name of the unanswered request.
        request: &'static str,
        /// Time limit that was exceeded.
        limit: Duration,
    },
    /// The back end closed the connection: it has ended, or it found a protocol error.
    #[error("vhost-user device {device}: the back end closed the connection at {request}; see its log")]
    Gone {
        /// Name of the device.
        device: Arc<str>,
        /// Name of the request at that time.
        request: &'static str,
    },
    /// The back end answered that the request failed.
    #[error("vhost-user device {device}: the back end refused {request}; see its log")]
    Refused {
        /// Name of the device.
        device: Arc<str>,
        /// Name of the request.
        request: &'static str,
    },
    /// The back end's answer breaks the protocol.
    #[error("vhost-user device {device}: the back end's answer to {request} breaks the protocol: {rule}")]
    Misbehaved {
        /// Name of the device.
        device: Arc<str>,
        /// Name of the request.
        request: &'static str,
        /// The rule that the answer breaks.
        rule: String,
    },
    /// The back end cannot be migrated, or lacks a feature that is in use. The guest's driver or the source
    /// uses it.
    #[error(
        "vhost-user device {device}: the back end does not support {feature}; use a back end that supports it"
    )]
    Lacks {
        /// Name of the device.
        device: Arc<str>,
        /// Name of the missing feature.
        feature: String,
    },
    /// The back end reports that the transfer of its state failed (CHECK_DEVICE_STATE).
    #[error(
        "vhost-user device {device}: the back end reports that {direction} its state failed; see its log"
    )]
    State {
        /// Name of the device.
        device: Arc<str>,
        /// Direction of the transfer.
        direction: StateDirection,
    },
    /// The transfer of the back end's state makes no progress and does not end.
    #[error(
        "vhost-user device {device}: {direction} its state made no progress for {limit:?} after {bytes} bytes"
    )]
    Stalled {
        /// Name of the device.
        device: Arc<str>,
        /// Direction of the transfer.
        direction: StateDirection,
        /// Bytes transferred before the failure.
        bytes: u64,
        /// Time limit that was exceeded.
        limit: Duration,
    },
    /// The pipe for the state failed.
    #[error("vhost-user device {device}: {direction} its state failed after {bytes} bytes: {source}")]
    Pipe {
        /// Name of the device.
        device: Arc<str>,
        /// Direction of the transfer.
        direction: StateDirection,
        /// Bytes transferred before the failure.
        bytes: u64,
        /// Error that the system call returned.
        source: io::Error,
    },
    /// A ring has an invalid address or size.
    #[error("vhost-user device {device}: ring {ring}: {rule}")]
    Ring {
        /// Name of the device.
        device: Arc<str>,
        /// Index of the ring.
        ring: usize,
        /// The rule that the ring breaks.
        rule: &'static str,
    },
    /// A range of guest RAM cannot be shared with a back end.
    #[error("vhost-user device {device}: guest RAM range {range}: {rule}")]
    Memory {
        /// Name of the device.
        device: Arc<str>,
        /// Index of the range.
        range: usize,
        /// The rule that the range breaks.
        rule: &'static str,
    },
    /// The configuration space is not valid for a driver.
    #[error("vhost-user device {device}: {rule}")]
    Space {
        /// Name of the device.
        device: Arc<str>,
        /// The rule that the configuration space breaks.
        rule: String,
    },
    /// The back end has ended or has closed the connection.
    #[error(
        "vhost-user device {device}: the back end closed the connection; see its log. The guest continues to run \
         without the device"
    )]
    Ended {
        /// Name of the device.
        device: Arc<str>,
    },
    /// Another process has the back end, or had it last.
    #[error(
        "vhost-user device {device}: another process has the back end, and has not passed it on: migrate with mode \
         cpr-transfer (`sterna migrate --same-host`), or start this side with a separate back end"
    )]
    Awaited {
        /// Name of the device.
        device: Arc<str>,
    },
    /// A handed-over back end does not fit this device.
    #[error("vhost-user device {device}: its back end cannot be taken over: {rule}")]
    NotTaken {
        /// Name of the device.
        device: Arc<str>,
        /// The reason of the refusal.
        rule: String,
    },
    /// The source's record of the rings is invalid.
    #[error("vhost-user device {device}: the source's record of its rings: {rule}")]
    Configuration {
        /// Name of the device.
        device: Arc<str>,
        /// The rule that the record breaks.
        rule: String,
    },
    /// The call is not possible in the device's present state.
    #[error("vhost-user device {device}: {call} is not possible now: {state}")]
    OutOfOrder {
        /// Name of the device.
        device: Arc<str>,
        /// Name of the call.
        call: &'static str,
        /// The device's present state.
        state: &'static str,
    },
    /// The system refused a resource that the front end needs.
    #[error("vhost-user device {device}: {what}: {source}")]
    System {
        /// Name of the device.
        device: Arc<str>,
        /// Description of the failed operation.
        what: &'static str,
        /// Error that the system call returned.
        source: io::Error,
    },
}

impl VhostUserError {
    /// Converts the front end library's error of `request`.
    pub(super) fn of(device: &Arc<str>, request: &'static str, error: vhost::Error) -> Self {
        let device = Arc::clone(device);
        match error {
            vhost::Error::VhostUserProtocol(
                ProtocolError::Disconnected
                | ProtocolError::PartialMessage
                | ProtocolError::SocketBroken(_)
                | ProtocolError::SocketError(_),
            ) => Self::Gone { device, request },
            vhost::Error::VhostUserProtocol(ProtocolError::BackendInternalError) => {
                Self::Refused { device, request }
            }
            other => Self::Misbehaved { device, request, rule: other.to_string() },
        }
    }
}

impl From<VhostUserError> for VmError {
    fn from(error: VhostUserError) -> Self {
        let what = match &error {
            VhostUserError::State { direction, .. }
            | VhostUserError::Stalled { direction, .. }
            | VhostUserError::Pipe { direction, .. } => match direction {
                StateDirection::Save => "saving a device's state",
                StateDirection::Load => "loading a device's state",
            },
            _ => "migrating a device",
        };
        VmError::new(what, error)
    }
}
