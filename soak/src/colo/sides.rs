//! Makes the two sides of a case's protection, in this process or in another.

use std::sync::Arc;

use sterna::{Address, SourceVm};
use sterna_standby::{
    Claims, ContactRules, EpochGate, Guardians, Primary, PrimaryOptions, Protection, Secret, Standby,
    StandbyOptions, VmSurvivor,
};

use super::case::Case;

fn secret() -> Secret {
    Secret::from_bytes([5; 32])
}

impl Case {
    /// A standby that listens on a port chosen by the kernel.
    pub(super) fn standby(&self, survivor: VmSurvivor, claims: Arc<dyn Claims>) -> Result<Standby, String> {
        let (params, capabilities) = self.settings();
        let rules = ContactRules {
            secret: secret(),
            is_required: true,
            claims: Arc::new(move |_| Arc::clone(&claims)),
            fence: Arc::new(|_| Err("a guest of this process stops by itself".to_owned())),
            always_fences: false,
        };
        let at = "tcp:127.0.0.1:0".parse().map_err(|error| format!("an address: {error}"))?;
        let options = StandbyOptions { insecure: true, ..StandbyOptions::default() };
        Standby::protect(&at, &options, params, capabilities, Arc::new(()), Arc::new(survivor), Some(rules))
            .map_err(|error| error.to_string())
    }

    /// Starts to protect `vm`, with the standby at this address.
    pub(super) fn primary(
        &self,
        vm: Arc<dyn SourceVm>,
        at: &Address,
        gate: Arc<dyn EpochGate>,
        claims: Arc<dyn Claims>,
    ) -> Result<Primary, String> {
        let (params, capabilities) = self.settings();
        let options = PrimaryOptions {
            checkpoint_mode: self.mode,
            checkpoint_delay: self.delay,
            checkpoints_in_flight: self.in_flight,
            checkpoint_copy: self.copy,
            terms: self.terms,
            buffer_bytes: self.buffer_bytes,
        };
        let protection = Protection { id: [7; 16], generation: 1 };
        let guardians = Guardians { protection, secret: secret(), claims, gate };
        Primary::protect(vm, at, &options, guardians, params, capabilities, Arc::new(()))
            .map_err(|error| error.to_string())
    }
}
