//! What can go wrong with a back end. Every error names the device.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use sterna::VmError;
use vhost::vhost_user::Error as ProtocolError;

/// Which way a back end's state was moving.
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

/// A vhost-user device could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VhostUserError {
    /// Nobody listens there, or not in time.
    #[error("vhost-user device {device}: cannot connect to {}: {source}; is its back end running?", socket.display())]
    Connect {
        /// The device's name.
        device: Arc<str>,
        /// Where the back end should listen.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The back end did not answer in time. It may do so later: the connection stays as it is.
    #[error(
        "vhost-user device {device}: the back end did not answer {request} within {limit:?}; is it stopped?"
    )]
    NoAnswer {
        /// The device's name.
        device: Arc<str>,
        /// The request that it owes an answer to.
        request: &'static str,
        /// How long was waited.
        limit: Duration,
    },
    /// The back end closed the connection: it has ended, or thinks that we misbehaved.
    #[error(
        "vhost-user device {device}: the back end closed the connection at {request}; see what it printed"
    )]
    Gone {
        /// The device's name.
        device: Arc<str>,
        /// What was asked of it then.
        request: &'static str,
    },
    /// The back end answered that it cannot.
    #[error("vhost-user device {device}: the back end refused {request}; see what it printed")]
    Refused {
        /// The device's name.
        device: Arc<str>,
        /// What was asked of it.
        request: &'static str,
    },
    /// The back end's answer is none.
    #[error("vhost-user device {device}: the back end's answer to {request} breaks the protocol: {rule}")]
    Misbehaved {
        /// The device's name.
        device: Arc<str>,
        /// What was asked of it.
        request: &'static str,
        /// What is wrong with the answer.
        rule: String,
    },
    /// The back end cannot be migrated, or lacks what the guest's driver or the source uses.
    #[error("vhost-user device {device}: the back end lacks {feature}; use one that has it")]
    Lacks {
        /// The device's name.
        device: Arc<str>,
        /// What is missing.
        feature: String,
    },
    /// The back end says that the transfer of its state failed (CHECK_DEVICE_STATE).
    #[error(
        "vhost-user device {device}: the back end reports that {direction} its state failed; see what it printed"
    )]
    State {
        /// The device's name.
        device: Arc<str>,
        /// Which way.
        direction: StateDirection,
    },
    /// The back end neither moves its state on nor ends.
    #[error(
        "vhost-user device {device}: {direction} its state made no progress for {limit:?} after {bytes} bytes"
    )]
    Stalled {
        /// The device's name.
        device: Arc<str>,
        /// Which way.
        direction: StateDirection,
        /// Bytes that had moved.
        bytes: u64,
        /// How long was waited.
        limit: Duration,
    },
    /// The pipe for the state broke.
    #[error("vhost-user device {device}: {direction} its state failed after {bytes} bytes: {source}")]
    Pipe {
        /// The device's name.
        device: Arc<str>,
        /// Which way.
        direction: StateDirection,
        /// Bytes that had moved.
        bytes: u64,
        /// Why.
        source: io::Error,
    },
    /// A ring cannot be where it was said to be.
    #[error("vhost-user device {device}: ring {ring}: {rule}")]
    Ring {
        /// The device's name.
        device: Arc<str>,
        /// Which ring.
        ring: usize,
        /// What is wrong with it.
        rule: &'static str,
    },
    /// Guest RAM that a back end cannot be given.
    #[error("vhost-user device {device}: guest RAM range {range}: {rule}")]
    Memory {
        /// The device's name.
        device: Arc<str>,
        /// Its place in the list.
        range: usize,
        /// What is wrong with it.
        rule: &'static str,
    },
    /// A device that no driver may be given.
    #[error("vhost-user device {device}: {rule}")]
    Space {
        /// The device's name.
        device: Arc<str>,
        /// What is wrong with its configuration space.
        rule: String,
    },
    /// The back end has ended, or has closed the connection.
    #[error(
        "vhost-user device {device}: the back end closed the connection; see what it printed. The guest goes on without it"
    )]
    Ended {
        /// The device's name.
        device: Arc<str>,
    },
    /// Another process has the back end, or had it last.
    #[error(
        "vhost-user device {device}: another process has the back end, and has not handed it over: migrate with mode cpr-transfer \
         (`sterna migrate --same-host`), or start this side with a back end of its own"
    )]
    Awaited {
        /// The device's name.
        device: Arc<str>,
    },
    /// What another process hands over is not for this device.
    #[error("vhost-user device {device}: its back end cannot be taken over: {rule}")]
    NotTaken {
        /// The device's name.
        device: Arc<str>,
        /// Why.
        rule: String,
    },
    /// The record of the rings that came from the source is none.
    #[error("vhost-user device {device}: the source's record of its rings: {rule}")]
    Configuration {
        /// The device's name.
        device: Arc<str>,
        /// What is wrong with it.
        rule: String,
    },
    /// A call that does not fit what the device is doing.
    #[error("vhost-user device {device}: {call} is not possible now: {state}")]
    OutOfOrder {
        /// The device's name.
        device: Arc<str>,
        /// What was called.
        call: &'static str,
        /// What the device is doing.
        state: &'static str,
    },
    /// This machine refused what the front end needs for itself.
    #[error("vhost-user device {device}: {what}: {source}")]
    System {
        /// The device's name.
        device: Arc<str>,
        /// What was tried.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

impl VhostUserError {
    /// How the front end's library says that `request` failed.
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
