//! The guest's disks at its standby (`specs/replica.md §6`).
//!
//! The primary sends each disk's writes by NBD, in addition to its own disk. During the seeding, writes go to the
//! disk's file. Afterwards they are buffered. All writes of an epoch are acknowledged before its checkpoint is sent.
//! Therefore the buffer is cut when the checkpoint becomes held: the buffered writes go to the file. Later writes
//! wait for the next checkpoint, or are dropped.
//!
//! | module | contains |
//! | --- | --- |
//! | `buffered` | one disk: file, buffer, connection |
//! | `file`, `budget` | the disk's content, and the limit of the buffers |
//! | `overlay` | the writes of one epoch |
//! | `serve` | the NBD server |

mod budget;
mod buffered;
mod file;
mod overlay;
mod serve;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use sterna::error::{BadConnection, MigrationError, Misbehaviour, ProtectionDifference};
use sterna::internals::threads::{self, ThreadRole};
use sterna_transport::Channel;

use budget::Budget;
use buffered::Disk;
pub use file::{DiskFile, StandbyDisk};

/// Most connections that have not chosen a disk yet, in addition to one connection per disk.
const STRANGERS: usize = 16;

/// All disks of a standby.
pub(super) struct Disks {
    disks: Vec<Arc<Disk>>,
    strangers: AtomicUsize,
    budget: Arc<Budget>,
    /// Called when the primary's connection of a disk is lost.
    on_lost: OnceLock<Box<dyn Fn(MigrationError) + Send + Sync>>,
}

impl Disks {
    /// Creates the disks. Their buffers use at most `limit_bytes` together.
    pub(super) fn new(disks: Vec<StandbyDisk>, limit_bytes: u64) -> Self {
        let budget = Arc::new(Budget::new(limit_bytes));
        let disk = |disk: StandbyDisk| Arc::new(Disk::new(disk, Arc::clone(&budget)));
        let disks = disks.into_iter().map(disk).collect();
        Self { disks, strangers: AtomicUsize::new(0), budget, on_lost: OnceLock::new() }
    }

    /// Sets the function that is called when the primary's connection of a disk is lost.
    pub(super) fn on_lost(&self, act: impl Fn(MigrationError) + Send + Sync + 'static) {
        // The standby calls this once, when it is created.
        let _ = self.on_lost.set(Box::new(act));
    }

    /// The most bytes that the buffers have used.
    pub(super) fn most_bytes(&self) -> u64 {
        self.budget.most()
    }

    /// Serves a connection that was identified as one for a disk. Its NBD handshake follows.
    pub(super) fn serve(self: &Arc<Self>, channel: &Arc<Channel>) -> Result<(), MigrationError> {
        if self.disks.is_empty() {
            return Err(ProtectionDifference::NoDisks { peer: channel.peer().to_owned() }.into());
        }
        if self.strangers.fetch_add(1, Ordering::AcqRel) >= STRANGERS {
            self.strangers.fetch_sub(1, Ordering::AcqRel);
            let (peer, why) = (channel.peer().to_owned(), BadConnection::TooManyDisks);
            return Err(Misbehaviour::Connection { peer, why }.into());
        }
        let (this, channel) = (Arc::clone(self), Arc::clone(channel));
        let died = {
            let (this, channel) = (Arc::clone(&this), Arc::clone(&channel));
            move |error| {
                this.strangers.fetch_sub(1, Ordering::AcqRel);
                tracing::warn!("connection for a disk: {error}");
                channel.shutdown();
            }
        };
        // A panic of the server is caught here, so `died` gets only a panic of the VMM's hook for new threads.
        let serve = move || {
            let _ = threads::caught("a disk's server", || this.shake_hands_and_serve(&channel));
        };
        let thread = threads::spawn(ThreadRole::StandbyDisk, serve, died);
        thread.map(drop).inspect_err(|_| {
            self.strangers.fetch_sub(1, Ordering::AcqRel);
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
        // Only after the report: the shutdown makes the primary close its other connections, which would then be
        // reported as the cause.
        channel.shutdown();
    }

    /// Buffers writes from now on: the seeding is complete, and the guest is paused.
    ///
    /// # Errors
    /// This side does not have the content of a disk.
    pub(super) fn begin_epochs(&self) -> Result<(), MigrationError> {
        self.disks.iter().try_for_each(|disk| disk.begin_epochs())
    }

    /// Checks that all of the guest's writes have arrived here. Called while the guest is paused.
    ///
    /// # Errors
    /// Why a write may be missing.
    pub(super) fn check(&self) -> Result<(), MigrationError> {
        self.disks.iter().try_for_each(|disk| disk.check())
    }

    /// Assigns the writes so far to the checkpoint that becomes held now.
    pub(super) fn end_epoch(&self) {
        self.disks.iter().for_each(|disk| disk.end_epoch());
    }

    /// Writes the held checkpoint's writes to the files. Idempotent.
    ///
    /// # Errors
    /// The host's I/O error; the call may be repeated.
    pub(super) fn commit(&self) -> Result<(), MigrationError> {
        self.disks.iter().try_for_each(|disk| disk.commit())
    }

    /// Prepares the files for a guest that continues from the held checkpoint, and releases them.
    ///
    /// # Errors
    /// The host's I/O error; the call may be repeated.
    pub(super) fn take_over(&self) -> Result<(), MigrationError> {
        self.close();
        self.disks.iter().try_for_each(|disk| disk.take_over())
    }

    /// Refuses further writes, and drops those that belong to no held checkpoint.
    pub(super) fn close(&self) {
        self.disks.iter().for_each(|disk| disk.close());
    }

    /// Drops all buffered writes: the guest never runs here.
    pub(super) fn discard(&self) {
        self.disks.iter().for_each(|disk| disk.discard());
    }

    /// Prepares the disks for another seeding after a failed one.
    pub(super) fn reset(&self) {
        self.disks.iter().for_each(|disk| disk.reset());
    }
}

#[cfg(test)]
mod tests;
