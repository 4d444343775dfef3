//! A connection for a status question at `rdma:` (specs/rdma.md §10).

use std::sync::Arc;
use std::time::Instant;

use sterna_transport::{Address, Channel, resolve};
use sterna_wire::rdma::{ConnectRequest, Introduction, Part};

use crate::error::{Ending, MigrationError};
use crate::identity;
use crate::outgoing::carrier::transport::Question;
use crate::rdma::QuestionStream;

/// Opens the connection. It goes to the first of the host's addresses that accepts.
pub(super) fn ask(question: &Question<'_>) -> Result<Arc<Channel>, MigrationError> {
    let Question { shared, to, limit, cancel, adopt } = question;
    let Address::Rdma { host, port } = to else {
        return Err(MigrationError::Internal(format!("{to} is no address of RDMA")));
    };
    let params = shared.params();
    let peer = || shared.session.to.to_string();
    let introduction = Introduction {
        version: Introduction::VERSION,
        part: Part::Question,
        lanes: 0,
        chunk: params.rdma.chunk,
        session: shared.handover.identity.id,
        nonce: identity::nonce()?,
    };
    let request = ConnectRequest { pin_all: false, introduction: Some(introduction) };
    let fabric = params.rdma.fabric();
    let until = Instant::now().checked_add(*limit);
    let addresses = resolve(host, *port, until, cancel)
        .map_err(|error| Ending::NoAddress { peer: peer(), why: error.to_string() })?;
    let mut failure = Ending::NoAddress { peer: peer(), why: "the host has no address".to_owned() };
    for address in addresses {
        match QuestionStream::ask(&*fabric, address, &request, *limit, cancel) {
            Ok(stream) => return Ok(adopt(Channel::over(Arc::new(stream), format!("rdma:{address}")))),
            Err(error) => failure = Ending::Rdma { peer: peer(), error: Arc::new(error) },
        }
    }
    Err(failure.into())
}
