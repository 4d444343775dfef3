//! What the state without a VM and the migration's own state have to do with each other.

use std::sync::Arc;

use sterna_transport::Channel;

use crate::error::{ConfigurationDifference, MigrationError};
use crate::incoming::awaited_vm::Configuring;
use crate::incoming::shared::Shared;

impl Shared {
    /// The state of the migration itself: this one, or the one that was made with the VM.
    pub(in crate::incoming) fn current(self: &Arc<Self>) -> &Arc<Self> {
        self.successor().unwrap_or(self)
    }

    /// The state that was made with the VM from the source's configuration.
    pub(in crate::incoming) fn successor(&self) -> Option<&Arc<Self>> {
        self.configuring.as_ref().and_then(Configuring::made)
    }

    /// Takes over from `waiting` what belongs to the listener and the operator.
    pub(in crate::incoming) fn follow(&mut self, waiting: &Self) {
        self.can_be_dialled_again = waiting.can_be_dialled_again;
        self.closing = waiting.closing.clone();
        self.no_more_come = Arc::clone(&waiting.no_more_come);
        self.autostart = Arc::clone(&waiting.autostart);
        self.bell = Arc::clone(&waiting.bell);
        self.asked = Arc::clone(&waiting.asked);
    }

    /// Makes `made` the state of the migration. False: the migration was given up before.
    pub(in crate::incoming) fn hand_over_to(&self, made: &Arc<Self>) -> bool {
        let Some(configuring) = &self.configuring else { return false };
        // Decided under the same lock as `end_before_it_began`.
        let arrival = self.arrival.lock();
        if arrival.is_some() || self.closing.is_cancelled() {
            return false;
        }
        configuring.set_made(Arc::clone(made));
        drop(arrival);
        configuring.wake(false);
        self.changed.notify_all();
        true
    }

    /// Accepts no other main channel than `channel`.
    pub(in crate::incoming) fn set_only_main(&self, channel: &Arc<Channel>) {
        let _ = self.only_main.set(Arc::clone(channel));
    }

    /// Refuses a main channel of a source that is not the one for which the VM was made.
    pub(in crate::incoming) fn check_only_main(&self, channel: &Arc<Channel>) -> Result<(), MigrationError> {
        match self.only_main.get() {
            Some(only) if !Arc::ptr_eq(only, channel) => {
                Err(ConfigurationDifference::Taken { peer: channel.peer().to_owned() }.into())
            }
            _ => Ok(()),
        }
    }
}
