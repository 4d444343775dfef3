//! Registers a connection among the writers before the source can use it.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use sterna_transport::rdma::{Adapter, Connection, QueuePairAttributes, RdmaError, Request};

use super::state::Rdma;

/// A connect request for a connection with the right to write guest memory.
pub(super) struct WriterRequest {
    pub(super) request: Box<dyn Request>,
    pub(super) rdma: Arc<Rdma>,
    pub(super) source: u64,
}

impl Request for WriterRequest {
    fn adapter(&self) -> Arc<dyn Adapter> {
        self.request.adapter()
    }

    fn peer(&self) -> SocketAddr {
        self.request.peer()
    }

    fn private_data(&self) -> &[u8] {
        self.request.private_data()
    }

    fn reject(self: Box<Self>, private_data: &[u8]) -> Result<(), RdmaError> {
        self.request.reject(private_data)
    }

    fn open(self: Box<Self>, attributes: &QueuePairAttributes) -> Result<Arc<dyn Connection>, RdmaError> {
        let peer = self.request.peer().to_string();
        let connection = self.request.open(attributes)?;
        if !self.rdma.enters(self.source, &connection) {
            connection.destroy();
            return Err(RdmaError::Ended { peer, event: None });
        }
        Ok(connection)
    }
}

impl fmt::Debug for WriterRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { request, rdma: _, source } = self;
        f.debug_struct("WriterRequest")
            .field("request", request)
            .field("source", source)
            .finish_non_exhaustive()
    }
}
