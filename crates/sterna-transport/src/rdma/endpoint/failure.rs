//! Why a request failed.

use crate::rdma::adapter::PortState;
use crate::rdma::connection::Connection;
use crate::rdma::error::RdmaError;
use crate::rdma::event::Event;
use crate::rdma::work::CompletionStatus;

/// Makes the error for a failed request of this side.
pub(super) fn failed(
    connection: &dyn Connection,
    operation: &'static str,
    status: CompletionStatus,
    remote_address: Option<u64>,
) -> RdmaError {
    let peer = connection.peer().to_string();
    match connection.end() {
        // The end of the connection flushed the request.
        Some(event) if status == CompletionStatus::WorkRequestFlushed => {
            RdmaError::Ended { peer, event: Some(event) }
        }
        // The packet could not leave this host, so no peer could answer.
        None if status == CompletionStatus::RetryExceeded && has_no_link(connection) => {
            RdmaError::Ended { peer, event: Some(Event::PortDown) }
        }
        _ => RdmaError::Failed { peer, operation, status, remote_address },
    }
}

pub(super) fn has_no_link(connection: &dyn Connection) -> bool {
    connection.adapter().info().state == PortState::Down
}
