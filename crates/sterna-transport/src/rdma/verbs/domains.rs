//! Protection domains of the devices that are in use.

use crate::rdma::verbs::ports;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::rdma::error::RdmaError;
use crate::rdma::verbs::context::Context;
use crate::rdma::verbs::domain::Domain;
use crate::rdma::verbs::id::Id;

/// The protection domains of a fabric, one for each device.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    of_contexts: Mutex<HashMap<usize, Weak<Domain>>>,
}

impl Domains {
    /// The domain of the device that `id` is bound to.
    pub(crate) fn of(&self, id: &Id) -> Result<Arc<Domain>, RdmaError> {
        let context = Context::of(id)?;
        let mut domains = self.of_contexts.lock();
        if let Some(domain) = domains.get(&context.raw().addr()).and_then(Weak::upgrade) {
            return Ok(domain);
        }
        let key = context.raw().addr();
        let domain = Domain::new(context)?;
        domains.insert(key, Arc::downgrade(&domain));
        Ok(domain)
    }
}

/// Refuses a loopback address. It has no RDMA device, although the kernel allows listening on it.
pub(crate) fn refuse_loopback(address: SocketAddr) -> Result<(), RdmaError> {
    match address.ip().to_canonical().is_loopback() {
        true => Err(with_addresses(RdmaError::NoDevice { address: place(address), having: Vec::new() })),
        false => Ok(()),
    }
}

/// The address for messages: without a port if the port is 0.
pub(super) fn place(address: SocketAddr) -> String {
    match address.port() {
        0 => address.ip().to_string(),
        _ => address.to_string(),
    }
}

/// Adds the usable addresses of this host to the error.
pub(super) fn with_addresses(error: RdmaError) -> RdmaError {
    match error {
        RdmaError::NoDevice { address, .. } => {
            RdmaError::NoDevice { address, having: ports::addresses_with_a_device() }
        }
        other => other,
    }
}
