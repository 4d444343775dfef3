//! What the taking of checkpoints asks of the contact and the gate.

use std::sync::{Arc, Weak};
use std::time::Instant;

use sterna_proto::replica::primary::Event;
use sterna_wire::replica::Output;

use super::gate::EpochGate;
use super::guest::ProtectedGuest;
use crate::error::{Fault, MigrationError};
use crate::outgoing::protection::Overseer;
use crate::replica::contact::PrimaryContact;

pub(super) struct PrimaryOverseer {
    contact: PrimaryContact,
    /// It has the migration, which has this.
    guest: Weak<ProtectedGuest>,
    gate: Arc<dyn EpochGate>,
}

impl PrimaryOverseer {
    pub(super) fn new(
        contact: PrimaryContact,
        guest: &Arc<ProtectedGuest>,
        gate: Arc<dyn EpochGate>,
    ) -> Self {
        Self { contact, guest: Arc::downgrade(guest), gate }
    }
}

impl Overseer for PrimaryOverseer {
    fn may_take(&self, is_last: bool) -> bool {
        self.contact.may_take_checkpoint(is_last)
    }

    fn end_epoch(&self, number: u64) -> Output {
        if number == 1 {
            // Before the first checkpoint nothing is held: the standby cannot take over.
            let contact = self.contact.clone();
            self.gate.close(Box::new(move |epoch| contact.may_say(epoch)));
            // One that has ended meanwhile has opened the gate before.
            if self.contact.has_failed() {
                self.gate.open();
            }
        }
        self.gate.end_epoch(number);
        let (position, bytes) = self.gate.unsaid();
        Output { position, bytes }
    }

    fn taken(&self, number: u64, is_last: bool) -> Result<(), MigrationError> {
        if is_last {
            // The contact has it as long as it waits for one.
            if let Some(guest) = self.guest.upgrade() {
                guest.last_taken(number);
            }
            return Ok(());
        }
        let refused = |refusal: sterna_proto::replica::primary::Refusal| {
            MigrationError::Internal(format!("checkpoint {number}: {refusal}"))
        };
        self.contact.checkpoint_taken(number).map_err(refused)
    }

    fn output_waits_since(&self) -> Option<Instant> {
        self.gate.waits_since()
    }

    fn failed(&self, error: &MigrationError) {
        let event = match error.fault() {
            Some(Fault::Local) => Event::LocalFailure,
            Some(_) => Event::PeerMisbehaved,
            None => Event::ConnectionLost,
        };
        if !self.contact.is_over_after_last_word() {
            self.contact.failed(error, event);
        }
    }
}
