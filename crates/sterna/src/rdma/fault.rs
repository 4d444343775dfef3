//! Whose fault an error of RDMA is.

use std::error::Error;

use sterna_transport::rdma::RdmaError;
use sterna_transport::{StreamError, TransportError};
use sterna_wire::Fault;

use super::commands::StreamFailure;

/// The side at fault for an RDMA error. A message may break a rule, or the adapter or kernel may refuse a request.
pub(crate) fn fault(error: &TransportError) -> Option<Fault> {
    let source: &(dyn Error + 'static) = match error {
        TransportError::Protocol { source, .. } => &**source,
        TransportError::Rdma { source, .. } => source,
        TransportError::Connect { source, .. } => match source.get_ref()?.downcast_ref()? {
            StreamError::Rdma(error) => error,
            StreamError::Protocol(error) => &**error,
            _ => return None,
        },
        _ => return None,
    };
    match (source.downcast_ref::<StreamFailure>(), source.downcast_ref::<RdmaError>()) {
        (Some(failure), _) => failure.fault(),
        (_, Some(error)) if error.is_local() => Some(Fault::Local),
        _ => None,
    }
}
