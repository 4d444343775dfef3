//! The transports at which a destination waits for a guest.

use std::sync::Arc;

use sterna_ram::{Custody, CustodyClaim};
use sterna_transport::{Address, Listener};

use super::shared::Shared;
use super::target::Target;
use super::{Incoming, accept, file, rdma};
use crate::events::Observer;
use crate::params::{Capabilities, Parameters};
use crate::start_error::StartError;

/// How a guest arrives at an address of one kind.
pub(super) struct Transport {
    /// Begins to wait for the guest, or to load it.
    pub begin: fn(Beginning<'_>) -> Result<Incoming, StartError>,
    /// A source whose connection was lost can connect again.
    pub can_wait: bool,
}

/// The transport to addresses of the kind of `address`.
pub(super) fn of(address: &Address) -> &'static Transport {
    match address {
        Address::Tcp { .. } | Address::Unix(_) => &NETWORK,
        Address::File { .. } => &file::TRANSPORT,
        Address::Rdma { .. } => &rdma::TRANSPORT,
        _ => &DESCRIPTOR,
    }
}

/// The transport of `tcp:` and `unix:`.
static NETWORK: Transport = Transport { begin: listen, can_wait: true };
/// The transport of descriptors, at which no second source can arrive.
static DESCRIPTOR: Transport = Transport { begin: listen, can_wait: false };

/// A migration whose settings were checked.
pub(super) struct Beginning<'a> {
    pub target: Arc<dyn Target>,
    pub at: &'a Address,
    pub params: Parameters,
    pub capabilities: Capabilities,
    pub observer: Arc<dyn Observer>,
}

impl Beginning<'_> {
    /// Claims the custody of the VM's guest, or of the place for a guest.
    pub(super) fn claim(&self) -> Result<Option<CustodyClaim>, StartError> {
        let arriving = Custody::Arriving { is_free: false };
        let claim = self.target.guest().map(|ram| ram.claim_custody(arriving, Custody::may_arrive));
        claim.transpose().map_err(StartError::Guest)
    }

    /// The state of the migration at `address`, which is bound.
    pub(super) fn shared(
        self,
        custody: Option<CustodyClaim>,
        address: Address,
    ) -> Result<Shared, StartError> {
        Shared::new((self.target, custody), address, self.params, self.capabilities, self.observer)
            .map_err(|error| StartError::System(error.to_string()))
    }
}

/// Listens for connections over sockets.
pub(super) fn listen(beginning: Beginning<'_>) -> Result<Incoming, StartError> {
    let custody = beginning.claim()?;
    let listener = Listener::bind(beginning.at).map_err(|error| StartError::System(error.to_string()))?;
    let address = listener.local_address();
    let shared = beginning.shared(custody, address)?;
    Incoming::begin(shared, |shared| accept::spawn(shared, listener))
}
