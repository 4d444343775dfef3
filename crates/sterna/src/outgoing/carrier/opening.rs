//! Opening the carrier that an address names.

use std::sync::Arc;

use sterna_transport::Address;

use super::interface::Carrier;
use super::sockets::Sockets;
use crate::error::MigrationError;
use crate::outgoing::file::SaveFile;
use crate::outgoing::rdma::carrier::RdmaCarrier;
use crate::outgoing::shared::Shared;

/// Opens every channel, and writes the first bytes of each.
pub(in crate::outgoing) fn open(shared: &Arc<Shared>) -> Result<Box<dyn Carrier>, MigrationError> {
    let carrier: Box<dyn Carrier> = match &shared.session.to {
        Address::File { .. } => Box::new(SaveFile::open(shared)?),
        Address::Rdma { .. } => Box::new(RdmaCarrier::open(shared)?),
        _ => Box::new(Sockets::open(shared)?),
    };
    carrier.greet()?;
    Ok(carrier)
}
