//! Performs the contact's actions on a guest of this process.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use parking_lot::Mutex;
use sterna::error::VmError;
use sterna::internals::Protecting;
use sterna::outgoing::Migration;

use super::gate::EpochGate;
use crate::contact::PrimaryGuest;

/// Interval between two checks whether a last checkpoint is still possible.
const LOOK: Duration = Duration::from_millis(50);

/// How long a planned takeover waits for the guest's last output to leave. Output is lost only if its reader does not
/// read within this time.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A guest that runs in this process.
pub(super) struct ProtectedGuest {
    gate: Arc<dyn EpochGate>,
    /// The migration that seeds the standby; set when the seeding begins.
    seeding: Mutex<Option<(Migration, Arc<Protecting>)>>,
    last: Mutex<Last>,
}

/// The number of the last checkpoint, and a channel to confirm that the contact knows it.
type Told = (u64, SyncSender<()>);

#[derive(Default)]
struct Last {
    /// Number of the last checkpoint, after it was taken.
    number: Option<u64>,
    awaited: Option<SyncSender<Told>>,
}

impl ProtectedGuest {
    pub(super) fn new(gate: Arc<dyn EpochGate>) -> Self {
        Self { gate, seeding: Mutex::default(), last: Mutex::default() }
    }

    pub(super) fn is_of(&self, migration: Migration, protecting: Arc<Protecting>) {
        *self.seeding.lock() = Some((migration, protecting));
    }

    /// Reports that the last checkpoint was taken. Returns when the contact knows it.
    pub(super) fn last_taken(&self, number: u64) {
        let awaited = {
            let mut last = self.last.lock();
            last.number = Some(number);
            last.awaited.take()
        };
        let Some(awaited) = awaited else { return };
        let (told, is_told) = sync_channel(1);
        if awaited.send((number, told)).is_ok() {
            // An error means that no thread waits for the number any more.
            let _ = is_told.recv();
        }
    }

    /// Requests a checkpoint immediately. With `is_last`, the guest stays stopped afterwards.
    pub(super) fn want_checkpoint(&self, is_last: bool) {
        let seeding = self.seeding.lock().clone();
        if let Some((migration, protecting)) = seeding {
            protecting.want(is_last);
            migration.nudge();
        }
    }

    fn with_migration(&self, act: impl FnOnce(&Migration) -> Result<(), VmError>) -> Result<(), VmError> {
        let migration = self.seeding.lock().as_ref().map(|(migration, _)| migration.clone());
        migration.map_or(Ok(()), |migration| act(&migration))
    }

    fn await_last(&self, coming: &Receiver<Told>, taken: &dyn Fn(u64)) -> Result<(), VmError> {
        loop {
            if let Ok((number, told)) = coming.recv_timeout(LOOK) {
                taken(number);
                let _ = told.send(());
                return Ok(());
            }
            let seeding = self.seeding.lock();
            let error = match &*seeding {
                Some((migration, protecting)) if migration.outcome().is_none() => protecting.error(),
                _ => return Err(VmError::new("the last checkpoint", "the protection has ended")),
            };
            if let Some(error) = error {
                return Err(VmError::new("the last checkpoint", error));
            }
        }
    }
}

impl PrimaryGuest for ProtectedGuest {
    fn stop(&self) -> Result<(), VmError> {
        self.with_migration(Migration::withhold_guest)
    }

    fn resume(&self) -> Result<(), VmError> {
        self.with_migration(Migration::give_guest_back)
    }

    /// Nothing to do: the guest is stopped, and its custody records that another VM has it.
    fn destroy(&self) {}

    fn close_channels(&self) {
        // If the seeding has not begun, there are no channels to close.
        let _ = self.with_migration(|migration| {
            migration.close_channels();
            Ok(())
        });
    }

    fn take_last_checkpoint(&self, taken: &dyn Fn(u64)) -> Result<(), VmError> {
        let (sender, coming) = sync_channel(1);
        self.last.lock().awaited = Some(sender);
        self.want_checkpoint(true);
        self.await_last(&coming, taken)
    }

    fn release(&self, epoch: u64) {
        self.gate.release(epoch);
        if self.last.lock().number == Some(epoch) {
            self.gate.let_out(LAST_WORDS);
        }
    }

    fn open_gate(&self) {
        self.gate.open();
    }

    fn drop_output(&self) {
        self.gate.drop_output();
    }
}
