//! The transports at which a destination waits for a guest.
//!
//! Another transport is a folder with a function like those of [`of`], and two lines here: the module and its row.

pub(super) mod interface;
mod sockets;

use sterna_transport::Address;

use crate::start_error::StartError;
use interface::{Beginning, Waiting};

/// What begins to wait at addresses of the kind of `address`.
pub(super) fn of(address: &Address) -> fn(Beginning<'_>) -> Result<Waiting, StartError> {
    match address {
        Address::File { .. } => crate::incoming::file::wait,
        #[cfg(feature = "rdma")]
        Address::Rdma { .. } => crate::incoming::rdma::wait,
        _ => sockets::wait,
    }
}
