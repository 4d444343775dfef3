//! Reasons for which a server's connection ends.

use std::io;

use crate::vfio_user::wire::WireError;

/// Why a connection to a client ended.
#[derive(Debug)]
pub enum ServerEnd {
    /// The client or [`crate::vfio_user::Stopper::stop`] closed the connection.
    Disconnected,
    /// The device closed the connection ([`crate::vfio_user::BackendError::HangUp`]).
    HungUp,
    /// The client broke the protocol, and the position of the next message is unknown.
    Misbehaved(WireError),
    /// The connection failed with this error.
    Broken(io::Error),
}
