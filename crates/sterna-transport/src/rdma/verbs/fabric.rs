//! The fabric of this host's adapters, and the routes over them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::abi::*;
use super::connection::{Side, VerbsConnection};
use super::domain::{Domain, VerbsAdapter};
use super::domains::{Domains, refuse_loopback};
use super::domains::{place, with_addresses};
use super::errno::error;
use super::id::{CmWait, EventChannel, Id};
use super::library::Library;
use super::listener::VerbsListener;
use super::ports;
use crate::cancel::CancelFlag;
use crate::rdma::adapter::{Adapter, AdapterInfo};
use crate::rdma::connection::{Connection, QueuePairAttributes};
use crate::rdma::error::RdmaError;
use crate::rdma::fabric::{Fabric, Listener, Route};

/// The RDMA devices of this host, through libibverbs and librdmacm.
#[derive(Debug, Default)]
pub struct VerbsFabric {
    domains: Arc<Domains>,
    /// Mock libraries of a test; `None` means the installed ones.
    library: Option<&'static Library>,
}

impl VerbsFabric {
    /// A fabric over the installed libraries, which the first call loads.
    pub fn new() -> Self {
        Self::default()
    }

    /// A fabric over the mock libraries of a test.
    #[cfg(test)]
    pub(super) fn over(library: &'static Library) -> Self {
        Self { domains: Arc::default(), library: Some(library) }
    }

    fn library(&self) -> Result<&'static Library, RdmaError> {
        self.library.map_or_else(Library::get, Ok)
    }
}

impl Fabric for VerbsFabric {
    fn adapters(&self) -> Result<Vec<AdapterInfo>, RdmaError> {
        ports::all(self.library()?)
    }

    fn listen(&self, address: SocketAddr, backlog: u32) -> Result<Arc<dyn Listener>, RdmaError> {
        let listener = VerbsListener::new(self.library()?, address, backlog, self.domains.clone());
        listener.map(|listener| -> Arc<dyn Listener> { Arc::new(listener) }).map_err(with_addresses)
    }

    fn resolve(
        &self,
        address: SocketAddr,
        limit: Duration,
        cancel: &CancelFlag,
    ) -> Result<Box<dyn Route>, RdmaError> {
        let library = self.library()?;
        refuse_loopback(address)?;
        let subject = place(address);
        let resolve = || {
            let channel = EventChannel::new(library, &subject)?;
            let id = Id::new(library, &channel)?;
            let deadline = Instant::now().checked_add(limit);
            let milliseconds = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX).max(1);
            let wait = |what, begun: io::Result<()>, done| {
                let refused = |source| unresolved(what, &subject, source);
                begun.map_err(refused)?;
                match id.wait(deadline, &[cancel]).map_err(|e| error(&subject, "rdma_get_cm_event", e))? {
                    CmWait::Event(event) if event.kind == done => Ok(()),
                    CmWait::Event(event) => {
                        Err(refused(io::Error::from_raw_os_error(event.status.saturating_abs())))
                    }
                    CmWait::Cancelled => Err(RdmaError::Cancelled { address: subject.clone() }),
                    CmWait::TimedOut => {
                        Err(RdmaError::TimedOut { what: "resolving", address: subject.clone(), after: limit })
                    }
                }
            };
            wait("address", id.resolve_address(address, milliseconds), RDMA_CM_EVENT_ADDR_RESOLVED)?;
            wait("route", id.resolve_route(milliseconds), RDMA_CM_EVENT_ROUTE_RESOLVED)?;
            let domain = self.domains.of(&id)?;
            Ok(VerbsRoute { id, domain, peer: address })
        };
        resolve().map(|route| -> Box<dyn Route> { Box::new(route) }).map_err(with_addresses)
    }
}

fn unresolved(what: &'static str, address: &str, source: io::Error) -> RdmaError {
    match source.raw_os_error() {
        Some(libc::ENODEV) => RdmaError::NoDevice { address: address.to_owned(), having: Vec::new() },
        _ => RdmaError::Resolve { what, address: address.to_owned(), why: source.to_string() },
    }
}

#[derive(Debug)]
struct VerbsRoute {
    id: Id,
    domain: Arc<Domain>,
    peer: SocketAddr,
}

impl Route for VerbsRoute {
    fn adapter(&self) -> Arc<dyn Adapter> {
        Arc::new(VerbsAdapter { domain: self.domain.clone(), port: self.id.port_number() })
    }

    fn peer(&self) -> SocketAddr {
        self.peer
    }

    fn open(self: Box<Self>, attributes: &QueuePairAttributes) -> Result<Arc<dyn Connection>, RdmaError> {
        let Self { id, domain, peer } = *self;
        Ok(VerbsConnection::new(Side::Connects, peer, id, &domain, attributes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_addresses_are_refused_in_every_spelling() {
        for text in ["127.0.0.1:4444", "[::1]:4444", "[::ffff:127.0.0.1]:4444"] {
            let error = refuse_loopback(text.parse().unwrap()).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        assert!(refuse_loopback("10.9.0.1:4444".parse().unwrap()).is_ok());
    }
}
