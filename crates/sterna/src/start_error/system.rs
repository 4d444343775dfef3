//! Requests of a start that the operating system refused.

use std::sync::Arc;

use sterna_ram::RamError;
use sterna_transport::TransportError;
#[cfg(feature = "rdma")]
use sterna_transport::rdma::RdmaError;

use crate::error::{Cause, MigrationError};

/// The part of this side that the operating system refused to provide. Its error names the request.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SystemRefusal {
    /// A socket cannot be bound, or a file cannot be opened.
    #[error("{0}")]
    Transport(#[source] Arc<TransportError>),
    /// An address cannot be bound at an RDMA adapter.
    #[cfg(feature = "rdma")]
    #[error("{0}")]
    Rdma(#[source] Arc<RdmaError>),
    /// Memory of this side cannot be allocated or accessed.
    #[error("{0}")]
    Ram(#[source] Arc<RamError>),
    /// An image cannot be read.
    #[error("{0}")]
    Image(#[source] Cause),
    /// The engine cannot begin: for example, it gets no thread.
    #[error("{0}")]
    Engine(#[source] Arc<MigrationError>),
}

impl From<TransportError> for SystemRefusal {
    fn from(error: TransportError) -> Self {
        Self::Transport(Arc::new(error))
    }
}

#[cfg(feature = "rdma")]
impl From<RdmaError> for SystemRefusal {
    fn from(error: RdmaError) -> Self {
        Self::Rdma(Arc::new(error))
    }
}

impl From<RamError> for SystemRefusal {
    fn from(error: RamError) -> Self {
        Self::Ram(Arc::new(error))
    }
}

impl From<MigrationError> for SystemRefusal {
    fn from(error: MigrationError) -> Self {
        Self::Engine(Arc::new(error))
    }
}
