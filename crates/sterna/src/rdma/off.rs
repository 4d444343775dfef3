//! The engine without the feature `rdma`: nothing can be set, and no error is RDMA's.

use sterna_transport::TransportError;

use crate::error::Fault;

/// Settings of RDMA: none, because the Cargo feature `rdma` is off.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct RdmaParameters {}

pub(crate) fn fault(_: &TransportError) -> Option<Fault> {
    None
}
