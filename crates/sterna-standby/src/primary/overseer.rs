//! Connects the taking of checkpoints to the contact and the gate.

use std::sync::{Arc, Weak};
use std::time::Instant;

use sterna::error::{Fault, MigrationError};
use sterna::internals::Overseer;
use sterna_proto::replica::primary::Event;
use sterna_wire::replica::Output;

use super::gate::EpochGate;
use super::guest::ProtectedGuest;
use crate::contact::PrimaryContact;

pub(super) struct PrimaryOverseer {
    contact: PrimaryContact,
    /// Weak, because the guest has the migration, and the migration has this object.
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
            // Closed only now: before the first checkpoint no checkpoint is held, so the standby cannot take over.
            let contact = self.contact.clone();
            self.gate.close(Box::new(move |epoch| contact.may_say(epoch)));
            // If the contact has ended meanwhile, it opened the gate before it was closed here.
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
            // The guest passes the number to the contact if the contact waits for it.
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

    fn may_guest_run(&self) -> bool {
        self.contact.may_guest_run()
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
