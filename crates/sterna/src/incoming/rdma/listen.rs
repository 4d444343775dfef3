//! Listens for RDMA connect requests. Each is decided on before a resource is allocated for it.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sterna_transport::rdma::{Listener, RdmaError};
use sterna_transport::{CancelFlag, resolve};

use super::super::accept::{RETRY, unless_begun};
use super::super::shared::Shared;
use super::connect;
use super::state::Rdma;
use crate::error::MigrationError;
use crate::params::Parameters;
use crate::threads::{self, ThreadRole};

/// Connect requests that may wait for the listener thread.
const BACKLOG: u32 = 64;

/// Listens at a host name or address; an empty one means all addresses. Returns the port as well, which the
/// system chooses for port 0.
pub(in crate::incoming) fn bind(
    (host, port): (&str, u16),
    params: &Parameters,
) -> Result<(Arc<dyn Listener>, u16), RdmaError> {
    let fabric = params.rdma.fabric();
    let addresses = addresses(host, port, params.limits.setup)
        .map_err(|source| RdmaError::Bind { address: format!("{host}:{port}"), source })?;
    let mut last = RdmaError::NoDevice { address: format!("{host}:{port}"), having: Vec::new() };
    for address in addresses {
        match fabric.listen(address, BACKLOG) {
            Ok(listener) => {
                let port = listener.local_address().port();
                return Ok((listener, port));
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn addresses(host: &str, port: u16, limit: Duration) -> io::Result<Vec<SocketAddr>> {
    let host = if host.is_empty() { "::" } else { host };
    resolve(host, port, Instant::now().checked_add(limit), &CancelFlag::new())
}

/// Starts the listener thread. The port is released when the thread has ended.
pub(in crate::incoming) fn spawn(
    shared: &Arc<Shared>,
    rdma: &Arc<Rdma>,
    listener: Arc<dyn Listener>,
) -> Result<JoinHandle<()>, MigrationError> {
    let died = unless_begun(shared);
    let (shared, rdma) = (Arc::clone(shared), Arc::clone(rdma));
    threads::spawn(ThreadRole::Listener, move || listen(&shared, &rdma, &*listener), died)
}

fn listen(shared: &Arc<Shared>, rdma: &Arc<Rdma>, listener: &dyn Listener) {
    loop {
        match listener.accept(None, &shared.closing) {
            Ok(request) => connect::take(shared, rdma, request),
            Err(RdmaError::Cancelled { .. }) => break,
            // Memory is short at the moment, or a device was removed. The listener continues, because a
            // question may still arrive.
            Err(error) => {
                connect::refuse(shared, rdma, &format!("cannot take a connect request now: {error}"));
                if shared.closing.is_cancelled() {
                    break;
                }
                std::thread::sleep(RETRY);
            }
        }
    }
}
