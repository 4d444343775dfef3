//! How a connection ends.

use std::io;

use crate::vfio_user::wire::WireError;

/// How a connection ended.
#[derive(Debug)]
pub enum ServerEnd {
    /// The client closed it, or [`crate::vfio_user::Stopper::stop`] did.
    Disconnected,
    /// The device hung up.
    HungUp,
    /// The client broke the protocol so that no next message can be found.
    Misbehaved(WireError),
    /// It broke.
    Broken(io::Error),
}
