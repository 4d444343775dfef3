//! Connect requests through librdmacm: listening, rejecting and opening them.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::abi::*;
use super::connection::{Side, VerbsConnection};
use super::domain::{Domain, VerbsAdapter};
use super::domains::{Domains, refuse_loopback};
use super::errno::error;
use super::id::{CmWait, EventChannel, Id};
use super::library::Library;
use crate::cancel::CancelFlag;
use crate::rdma::adapter::Adapter;
use crate::rdma::connection::{Connection, QueuePairAttributes};
use crate::rdma::error::RdmaError;
use crate::rdma::fabric::{Listener, PRIVATE_DATA, Request};

#[derive(Debug)]
pub(crate) struct VerbsListener {
    id: Id,
    address: SocketAddr,
    closed: CancelFlag,
    domains: Arc<Domains>,
}

impl VerbsListener {
    pub(crate) fn new(
        library: &'static Library,
        address: SocketAddr,
        backlog: u32,
        domains: Arc<Domains>,
    ) -> Result<Self, RdmaError> {
        refuse_loopback(address)?;
        let subject = address.to_string();
        let channel = EventChannel::new(library, &subject)?;
        let id = Id::new(library, &channel)?;
        let listen = || {
            id.set_option(RDMA_OPTION_ID_REUSEADDR, 1)?;
            if address.ip().is_unspecified() && address.is_ipv6() {
                id.set_option(RDMA_OPTION_ID_AFONLY, 0)?;
            }
            id.bind(address)?;
            id.listen(i32::try_from(backlog).unwrap_or(i32::MAX))
        };
        listen().map_err(|source| match source.raw_os_error() {
            Some(libc::ENODEV) => RdmaError::NoDevice { address: subject, having: Vec::new() },
            _ => RdmaError::Bind { address: subject, source },
        })?;
        let address = id.local_address().unwrap_or(address);
        Ok(Self { id, address, closed: CancelFlag::new(), domains })
    }

    fn error(&self, call: &'static str, source: io::Error) -> RdmaError {
        error(self.address, call, source)
    }
}

impl Listener for VerbsListener {
    fn local_address(&self) -> SocketAddr {
        self.address
    }

    fn accept(&self, limit: Option<Duration>, cancel: &CancelFlag) -> Result<Box<dyn Request>, RdmaError> {
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let address = self.address.to_string();
            let waited = self.id.wait(deadline, &[cancel, &self.closed]);
            let event = match waited.map_err(|source| self.error("rdma_get_cm_event", source))? {
                CmWait::Event(event) => event,
                CmWait::Cancelled => return Err(RdmaError::Cancelled { address }),
                CmWait::TimedOut => {
                    let after = limit.unwrap_or_default();
                    return Err(RdmaError::TimedOut { what: "accepting on", address, after });
                }
            };
            // Other events concern requests whose peers have disconnected before the request was opened. Opening
            // then fails.
            let Some(id) = event.request else { continue };
            let mut private_data = event.private_data;
            private_data.resize(PRIVATE_DATA.request, 0);
            let peer = id.peer_address().unwrap_or_else(|| SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
            let domain = self.domains.of(&id)?;
            return Ok(Box::new(VerbsRequest { id: Some(id), domain, peer, private_data }));
        }
    }

    fn close(&self) {
        self.closed.cancel();
    }
}

#[derive(Debug)]
struct VerbsRequest {
    /// `None` after the request was answered.
    id: Option<Id>,
    domain: Arc<Domain>,
    peer: SocketAddr,
    private_data: Vec<u8>,
}

impl VerbsRequest {
    fn answered(&mut self) -> Result<Id, RdmaError> {
        self.id.take().ok_or_else(|| error(self.peer, "request", io::ErrorKind::NotConnected.into()))
    }
}

impl Request for VerbsRequest {
    fn adapter(&self) -> Arc<dyn Adapter> {
        let port = self.id.as_ref().map_or(0, Id::port_number);
        Arc::new(VerbsAdapter { domain: self.domain.clone(), port })
    }

    fn peer(&self) -> SocketAddr {
        self.peer
    }

    fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    fn reject(mut self: Box<Self>, private_data: &[u8]) -> Result<(), RdmaError> {
        let (len, limit) = (private_data.len(), PRIVATE_DATA.reject);
        if len > limit {
            return Err(RdmaError::PrivateData { what: "reject", len, limit });
        }
        let id = self.answered()?;
        id.reject(private_data).map_err(|source| error(self.peer, "rdma_reject", source))
    }

    fn open(mut self: Box<Self>, attributes: &QueuePairAttributes) -> Result<Arc<dyn Connection>, RdmaError> {
        let id = self.answered()?;
        let channel = EventChannel::new(id.library(), &self.peer.to_string())?;
        id.migrate(channel).map_err(|source| error(self.peer, "rdma_migrate_id", source))?;
        Ok(VerbsConnection::new(Side::Accepts, self.peer, id, &self.domain, attributes)?)
    }
}

impl Drop for VerbsRequest {
    fn drop(&mut self) {
        if let Some(id) = &self.id {
            // If it fails, the peer has already disconnected.
            let _ = id.reject(&[]);
        }
    }
}
