//! The destination of a migration over RDMA (specs/rdma.md).
//!
//! A listener thread decides on each connect request before it allocates a queue pair or memory ([`listen`]).
//! The main connection and the return path form one channel, which is then used as over a socket ([`connect`]).
//! At a hook of the stream the loader runs a phase ([`phase`]). A phase registers guest memory, which the
//! source then writes without the CPU of this side ([`windows`]).
//!
//! | when | the source's access to guest memory |
//! | --- | --- |
//! | a phase has registered a window | the source can write the window, unnoticed by this side |
//! | everything is loaded, before *prepare* is answered and before the guest starts | none: the right to write is removed from the main connection and the lanes, and half-open connections are destroyed ([`state::Rdma::end_writes`]) |
//! | at any time, over the return path or a question's connection | none: each uses its own protection domain |
//! | the channels are closed | none: the queue pairs are destroyed first, and then the registrations ([`state::Rdma::close`]) |

pub(super) mod carrier;
mod connect;
pub(super) mod listen;
pub(super) mod phase;
mod refusals;
mod source_chunk;
pub(super) mod state;
mod windows;
mod writer_request;
mod writers;

use std::sync::Arc;

use sterna_transport::Address;

use super::shared::Shared;
use super::transport::interface::{Beginning, Waiting};
use crate::error::MigrationError;
use crate::start_error::StartError;
use carrier::RdmaCarrier;
use state::Rdma;

/// Waits for connect requests at `rdma:`.
pub(super) fn wait(beginning: Beginning<'_>) -> Result<Waiting, StartError> {
    let Address::Rdma { host, port } = beginning.at else {
        let why = format!("{} is no address of RDMA", beginning.at);
        return Err(StartError::system(MigrationError::Internal(why)));
    };
    let custody = beginning.claim()?;
    let bound = listen::bind((host, *port), &beginning.params);
    let (listener, port) = bound.map_err(StartError::system)?;
    let address = Address::Rdma { host: host.clone(), port };
    let rdma = Arc::new(Rdma::new(&beginning.params, &beginning.capabilities));
    let mut shared = beginning.shared(custody, address)?;
    shared.carrier = Arc::new(RdmaCarrier(Arc::clone(&rdma)));
    let listen = move |shared: &Arc<Shared>| listen::spawn(shared, &rdma, listener).map(Some);
    Ok(Waiting { shared, listen: Box::new(listen) })
}
