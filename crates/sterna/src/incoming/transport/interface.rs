//! What a transport makes of a migration whose settings were checked.

use std::sync::Arc;
use std::thread::JoinHandle;

use sterna_ram::{Custody, CustodyClaim};
use sterna_transport::Address;

use crate::error::MigrationError;
use crate::events::Observer;
use crate::incoming::shared::Shared;
use crate::incoming::target::Target;
use crate::params::{Capabilities, Parameters};
use crate::start_error::StartError;

/// A migration whose settings were checked.
pub(in crate::incoming) struct Beginning<'a> {
    pub target: Arc<dyn Target>,
    pub at: &'a Address,
    pub params: Parameters,
    pub capabilities: Capabilities,
    pub observer: Arc<dyn Observer>,
}

impl Beginning<'_> {
    /// Claims the custody of the VM's guest, or of the place for a guest.
    pub(in crate::incoming) fn claim(&self) -> Result<Option<CustodyClaim>, StartError> {
        let arriving = Custody::Arriving { is_free: false };
        let claim = self.target.guest().map(|ram| ram.claim_custody(arriving, Custody::may_arrive));
        claim.transpose().map_err(StartError::Guest)
    }

    /// The state of the migration at `address`, which is bound.
    pub(in crate::incoming) fn shared(
        self,
        custody: Option<CustodyClaim>,
        address: Address,
    ) -> Result<Shared, StartError> {
        Shared::new((self.target, custody), address, self.params, self.capabilities, self.observer)
            .map_err(StartError::system)
    }
}

/// A migration that can begin: its address is bound, or its file is open.
pub(in crate::incoming) struct Waiting {
    pub shared: Shared,
    pub listen: Listen,
}

/// Starts the thread that accepts connections, if there is one. The control thread runs already.
pub(in crate::incoming) type Listen = Box<dyn FnOnce(&Arc<Shared>) -> Listening>;
pub(in crate::incoming) type Listening = Result<Option<JoinHandle<()>>, MigrationError>;
