//! Settings of RDMA.

use std::sync::Arc;

use sterna_transport::rdma::{Fabric, RdmaError, VerbsFabric};
use sterna_wire::rdma::ChunkSize;

/// Settings for RDMA alone (specs/rdma.md §6). Later versions add fields, as with [`Parameters`](crate::Parameters).
#[derive(Debug, Clone, Default)]
pub struct RdmaParameters {
    /// `x-rdma-chunk-size`. At the source: the longest WRITE, and the smallest piece of memory that is registered in
    /// one call. At the destination: only the latter. The two sides may differ unless both are QEMUs.
    pub chunk: ChunkSize,
    /// `x-sterna-rdma-pinned-limit`: most bytes of guest memory that are registered at the same time, if registration
    /// pins them. `None`: no limit.
    ///
    /// A source's limit applies to both sides, but allows at least two of the destination's chunks. A destination's
    /// limit applies to the destination. The limit has an effect only between two Sternas, because a QEMU never
    /// unregisters memory.
    pub pinned_limit_bytes: Option<u64>,
    /// The RDMA adapters to use; `None` for the adapters of this host.
    pub fabric: Option<Arc<dyn Fabric>>,
}

impl RdmaParameters {
    /// Loads libibverbs, librdmacm and the drivers of this host's adapters, and opens each adapter once.
    ///
    /// Call it before the process locks itself in: a library needs executable memory and reads files that a migration
    /// does not read again ([`sandbox`](crate::sandbox)). The libraries stay until the process ends.
    ///
    /// # Errors
    /// A library that is missing or too old, or devices that cannot be listed. A host without adapters is no error.
    pub fn load_libraries() -> Result<(), RdmaError> {
        VerbsFabric::new().adapters().map(drop)
    }

    /// The adapters to use: the given ones, or those of this host.
    pub(crate) fn fabric(&self) -> Arc<dyn Fabric> {
        self.fabric.clone().unwrap_or_else(|| Arc::new(VerbsFabric::new()))
    }
}

impl PartialEq for RdmaParameters {
    fn eq(&self, other: &Self) -> bool {
        let is_same_fabric = match (&self.fabric, &other.fabric) {
            (Some(ours), Some(theirs)) => Arc::ptr_eq(ours, theirs),
            (ours, theirs) => ours.is_none() && theirs.is_none(),
        };
        is_same_fabric && self.chunk == other.chunk && self.pinned_limit_bytes == other.pinned_limit_bytes
    }
}
