//! The guest's disks at its standby (`specs/replica.md §6`).
//!
//! The primary writes to each of them by NBD, beside its own. While the guest is seeded what is written goes to the disk's file. From then
//! on it is buffered. All writes of an epoch are acknowledged before its checkpoint is sent, so the buffer is cut at the moment at which
//! the checkpoint becomes held: what it has then goes to the file, and what comes later waits for the next one, or is dropped.
//!
//! | module | contains |
//! | --- | --- |
//! | `buffered` | one disk: file, buffer, connection |
//! | `file`, `budget` | its content, and what buffers may take |
//! | `overlay` | what was written of an epoch |
//! | `serve` | the NBD server |

mod budget;
mod buffered;
mod file;
mod overlay;
mod serve;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use sterna_transport::Channel;

use crate::error::MigrationError;
use budget::Budget;
use buffered::Disk;
pub use file::{DiskFile, StandbyDisk};

/// Connections for which disk they are is not known yet, beside one for each disk.
const STRANGERS: usize = 16;

/// All disks of a standby.
pub(super) struct Disks {
    disks: Vec<Arc<Disk>>,
    strangers: AtomicUsize,
    budget: Arc<Budget>,
    /// Whom to tell that a disk's writes come no more.
    on_lost: OnceLock<Box<dyn Fn(MigrationError) + Send + Sync>>,
}

impl Disks {
    /// Buffers of at most `limit_bytes` together.
    pub(super) fn new(disks: Vec<StandbyDisk>, limit_bytes: u64) -> Self {
        let budget = Arc::new(Budget::new(limit_bytes));
        let disk = |disk: StandbyDisk| Arc::new(Disk::new(disk, Arc::clone(&budget)));
        let disks = disks.into_iter().map(disk).collect();
        Self { disks, strangers: AtomicUsize::new(0), budget, on_lost: OnceLock::new() }
    }

    /// Whom to tell that a disk's writes come no more.
    pub(super) fn on_lost(&self, act: impl Fn(MigrationError) + Send + Sync + 'static) {
        // Set once, where it is made.
        let _ = self.on_lost.set(Box::new(act));
    }

    /// The most that buffers took.
    pub(super) fn most_bytes(&self) -> u64 {
        self.budget.most()
    }

    /// Serves a connection that has said that it is for a disk, from its NBD handshake on.
    pub(super) fn serve(self: &Arc<Self>, channel: &Arc<Channel>) -> Result<(), MigrationError> {
        if self.disks.is_empty() {
            let what = format!(
                "{}: the primary wants to write to a disk, and this standby has none: name it with `--disk`",
                channel.peer()
            );
            return Err(MigrationError::PeerIncompatible { what });
        }
        if self.strangers.fetch_add(1, Ordering::AcqRel) >= STRANGERS {
            self.strangers.fetch_sub(1, Ordering::AcqRel);
            let what = format!("{}: too many connections for disks", channel.peer());
            return Err(MigrationError::PeerMisbehaved { what });
        }
        let (this, channel) = (Arc::clone(self), Arc::clone(channel));
        let serve = move || this.shake_hands_and_serve(&channel);
        let thread = std::thread::Builder::new().name("disk".to_owned()).spawn(serve);
        thread.map(drop).map_err(|error| {
            self.strangers.fetch_sub(1, Ordering::AcqRel);
            MigrationError::System(format!("the host refuses a thread: {error}"))
        })
    }

    fn shake_hands_and_serve(&self, channel: &Arc<Channel>) {
        let shaken = serve::shake_hands(channel, &self.disks);
        self.strangers.fetch_sub(1, Ordering::AcqRel);
        let ended = match shaken {
            Ok(Some(disk)) => serve::serve(channel, &disk),
            Ok(None) => return channel.shutdown(),
            Err(why) => {
                tracing::warn!("connection for a disk: {why}");
                why
            }
        };
        let lost = self.disks.iter().find_map(|disk| disk.ended(channel, &ended));
        if let (Some(why), Some(tell)) = (lost, self.on_lost.get()) {
            tell(why);
        }
        // Not before: the primary closes everything then, and that would be taken for the reason.
        channel.shutdown();
    }

    /// The guest was seeded, and stands: what comes from now on is buffered.
    ///
    /// # Errors
    /// A disk's content is not here.
    pub(super) fn begin_epochs(&self) -> Result<(), MigrationError> {
        self.disks.iter().try_for_each(|disk| disk.begin_epochs())
    }

    /// Whether all that the guest has written came here. Asked while it stands.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn check(&self) -> Result<(), MigrationError> {
        self.disks.iter().try_for_each(|disk| disk.check())
    }

    /// What was written up to here is of the checkpoint that is held from now on.
    pub(super) fn end_epoch(&self) {
        self.disks.iter().for_each(|disk| disk.end_epoch());
    }

    /// Puts what the held checkpoint has written into the files. Doing it again changes nothing.
    ///
    /// # Errors
    /// The host's; it may be tried again.
    pub(super) fn commit(&self) -> Result<(), MigrationError> {
        self.disks.iter().try_for_each(|disk| disk.commit())
    }

    /// The files become the disks of the guest that goes on from the held checkpoint.
    ///
    /// # Errors
    /// The host's; it may be tried again.
    pub(super) fn take_over(&self) -> Result<(), MigrationError> {
        self.close();
        self.disks.iter().try_for_each(|disk| disk.take_over())
    }

    /// Nothing more comes: what no held checkpoint has is dropped.
    pub(super) fn close(&self) {
        self.disks.iter().for_each(|disk| disk.close());
    }

    /// The guest never runs here.
    pub(super) fn discard(&self) {
        self.disks.iter().for_each(|disk| disk.discard());
    }

    /// The seeding has failed.
    pub(super) fn reset(&self) {
        self.disks.iter().for_each(|disk| disk.reset());
    }
}

#[cfg(test)]
mod tests;
