//! Connects to the destination over RDMA (`specs/rdma.md §1`, `§2`).

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use sterna_transport::rdma::{Fabric, RdmaError};
use sterna_transport::{Address, Channel, StreamError, TransportError, resolve};
use sterna_wire::rdma::{ConnectReply, ConnectRequest, Introduction, Part};

use super::super::limits::CONNECTED_AT_ONCE;
use super::super::shared::Shared;
use super::source::{Connected, Peer, RdmaSource, WRITES};
use crate::error::{MigrationError, RdmaDifference};
use crate::identity;
use crate::params::Parameters;
use crate::rdma::{LaneSourceStream, SourceStream};
use crate::threads::side_by_side;

/// Connects to the destination over all addresses of its name.
///
/// Opens the main connection, and the return path if there is one.
pub(in crate::outgoing) fn connect(
    shared: &Shared,
    params: &Parameters,
) -> Result<Arc<RdmaSource>, MigrationError> {
    let Address::Rdma { host, port } = &shared.session.to else {
        return Err(MigrationError::Internal(format!("{} is no address of RDMA", shared.session.to)));
    };
    let (began, limit) = (Instant::now(), params.limits.setup);
    let failed = |error| MigrationError::from(explain(shared, params, error));
    let addresses = resolve(host, *port, began.checked_add(limit), &shared.session.connecting)
        .map_err(|error| failed(Unconnected::System(error)))?;
    let fabric = params.rdma.fabric();
    let mut last = Unconnected::System(io::Error::new(io::ErrorKind::NotFound, "the host has no address"));
    for address in addresses {
        let main = request(shared, params, Part::Main)?;
        let back = shared.capabilities.return_path.then(|| request(shared, params, Part::ReturnPath));
        let back = back.transpose()?;
        let left = limit.saturating_sub(began.elapsed());
        match SourceStream::connect(
            &*fabric,
            address,
            (&main, back.as_ref()),
            WRITES,
            left,
            &shared.session.connecting,
        ) {
            Ok((stream, reply)) => {
                let lanes = lanes(shared, params, (&*fabric, address), &reply)?;
                return connected(shared, params, (Arc::new(stream), lanes), (&main, &reply));
            }
            Err(error) => last = Unconnected::Stream(error),
        }
        if shared.session.connecting.is_cancelled() || began.elapsed() >= limit {
            break;
        }
    }
    Err(failed(last))
}

fn connected(
    shared: &Shared,
    params: &Parameters,
    (stream, lanes): (Arc<SourceStream>, Vec<Connected>),
    (request, reply): (&ConnectRequest, &ConnectReply),
) -> Result<Arc<RdmaSource>, MigrationError> {
    let registration = request.agreed(reply).map_err(MigrationError::wire("RDMA connection"))?;
    let channel = Channel::over(stream.clone(), shared.session.to.to_string());
    channel.set_stall_limit(Some(params.limits.stall));
    Ok(Arc::new(RdmaSource {
        stream,
        channel: shared.adopt(channel),
        peer: reply.introduction.map_or(Peer::Qemu, |destination| Peer::Sterna(destination.chunk)),
        registration,
        chunk: params.rdma.chunk,
        pinned_limit: params.rdma.pinned_limit_bytes,
        destination_limit: reply.pinned_limit,
        places: OnceLock::new(),
        stall: params.limits.stall,
        counts: Arc::clone(&shared.measures.rdma),
        qemu_chunk: OnceLock::new(),
        lanes,
    }))
}

/// Connects the lanes in parallel, with multifd.
fn lanes(
    shared: &Shared,
    params: &Parameters,
    (fabric, to): (&dyn Fabric, SocketAddr),
    reply: &ConnectReply,
) -> Result<Vec<Connected>, MigrationError> {
    if !shared.capabilities.multifd {
        return Ok(Vec::new());
    }
    let wanted = params.multifd_channels;
    match &reply.introduction {
        None => return Err(RdmaDifference::MultifdOfQemu.into()),
        Some(reply) if reply.lanes < wanted => {
            return Err(RdmaDifference::Channels { theirs: reply.lanes, ours: wanted }.into());
        }
        Some(_) => {}
    }
    let cancel = shared.session.connecting.child();
    let lane = |lane: usize| -> Result<Connected, MigrationError> {
        let request = request(shared, params, Part::Lane(lane as u8))?;
        let limit = params.limits.setup;
        let stream = LaneSourceStream::connect(fabric, to, &request, WRITES, limit, &cancel);
        let stream = stream
            .map_err(|error| MigrationError::from(explain(shared, params, Unconnected::Stream(error))))?;
        let stream = Arc::new(stream);
        let channel = Channel::over(stream.clone(), shared.session.to.to_string());
        channel.set_stall_limit(Some(params.limits.stall));
        Ok((stream, shared.adopt(channel)))
    };
    side_by_side(usize::from(wanted), CONNECTED_AT_ONCE, lane, || cancel.cancel())
}

fn request(shared: &Shared, params: &Parameters, part: Part) -> Result<ConnectRequest, MigrationError> {
    let introduction = Introduction {
        version: Introduction::VERSION,
        part,
        chunk: params.rdma.chunk,
        lanes: if shared.capabilities.multifd { params.multifd_channels } else { 0 },
        session: shared.handover.identity.id,
        nonce: identity::nonce()?,
    };
    Ok(ConnectRequest { pin_all: shared.capabilities.rdma_pin_all, introduction: Some(introduction) })
}

/// The reason why there is no connection.
enum Unconnected {
    /// The name lookup failed.
    System(io::Error),
    Stream(StreamError),
}

fn explain(shared: &Shared, params: &Parameters, error: Unconnected) -> TransportError {
    let address = shared.session.to.to_string();
    if shared.session.connecting.is_cancelled() {
        return TransportError::Cancelled { channel: address };
    }
    let is_late = match &error {
        Unconnected::System(error) => {
            error.kind() == io::ErrorKind::TimedOut && error.raw_os_error().is_none()
        }
        Unconnected::Stream(error) => {
            matches!(error, StreamError::Quiet | StreamError::Rdma(RdmaError::TimedOut { .. }))
        }
    };
    match error {
        _ if is_late => {
            TransportError::TimedOut { what: "connecting to", address, after: params.limits.setup }
        }
        Unconnected::System(source) => TransportError::Connect { address, source },
        Unconnected::Stream(error) => TransportError::Connect { address, source: io::Error::other(error) },
    }
}
