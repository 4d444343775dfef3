//! What an outgoing migration needs whose destination is a standby: the guest stays here, and checkpoints follow the seeding
//! (`specs/replica.md §4`).
//!
//! The control thread takes them ([`super::control`], `checkpoints`). Who may run the guest is decided elsewhere: see
//! [`Overseer`].

mod copy;
mod delta;
mod inbox;
mod on_write;
mod pace;
mod pieces;
mod sent;
mod staging;
mod streams;
mod switch;
mod ways;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_wire::replica::Output;

pub(crate) use delta::{Coded, DeltaCache, DeltaCounts, Scratch};
pub(crate) use inbox::Inbox;
pub use pace::{CheckpointMode, MOST_IN_FLIGHT};
pub(crate) use pace::{Pace, Seen, counts_from, typical};
pub(crate) use sent::{SentPages, add_bytes, add_copied};
pub(crate) use staging::Staging;
pub(super) use streams::EpochStreams;
pub(crate) use switch::{GuestSwitch, Withholder};
pub use ways::CheckpointCopy;
pub(crate) use ways::CopyCounts;

use crate::error::MigrationError;

/// Decides who may run the guest, and holds its output.
pub(crate) trait Overseer: Send + Sync {
    /// Whether another checkpoint may be taken now: the standby is in contact, and holds enough of the earlier ones. `is_last`: the one after
    /// which the guest stays stopped.
    fn may_take(&self, is_last: bool) -> bool;
    /// The guest stands for checkpoint `number`: what it has said so far belongs to that epoch, what it says from now on to the next.
    /// Gives what was said and has not left.
    fn end_epoch(&self, number: u64) -> Output;
    /// Checkpoint `number` was taken. Called while the guest stands, before its end is handed to the transport.
    fn taken(&self, number: u64, is_last: bool) -> Result<(), MigrationError>;
    /// Since when output waits that no checkpoint has been taken of.
    fn output_waits_since(&self) -> Option<Instant>;
    /// What carries the checkpoints has failed, or the taking of one did.
    fn failed(&self, error: &MigrationError);
}

/// Counts of a protection.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counts {
    /// Checkpoints that were taken.
    pub taken: u64,
    /// Checkpoints that the standby has promised to hold (RECEIVED).
    pub received: u64,
    /// Pages that checkpoints brought, zero pages among them.
    pub pages: u64,
    /// Bytes of devices that they brought.
    pub device_bytes: u64,
    /// Those that did not fit the staging memory, so that the guest stood until they were sent.
    pub unstaged: u64,
    /// What pauses take now.
    pub pause: Option<Duration>,
    /// The last pauses of the guest, newest last; at most [`LAST_PAUSES`].
    pub pauses: std::collections::VecDeque<Duration>,
    /// From the end of the last pause until RECEIVED.
    pub last_transfer: Duration,
    /// Pages of the last one.
    pub last_pages: u64,
}

/// Pauses that are kept, so that their distribution can be told.
pub(crate) const LAST_PAUSES: usize = 1024;

/// What a migration to a standby shares with whoever protects the guest.
pub(crate) struct Protecting {
    pub overseer: Arc<dyn Overseer>,
    pub inbox: Inbox,
    pub staging: Arc<Staging>,
    pub switch: GuestSwitch,
    pub pace: Mutex<Pace>,
    pub counts: Mutex<Counts>,
    pub deltas: Arc<DeltaCounts>,
    pub sent: Arc<SentPages>,
    /// Asked for, and not taken yet.
    wanted: Mutex<Wanted>,
}

/// What was asked for.
#[derive(Debug, Clone, Copy, Default)]
struct Wanted {
    /// A checkpoint at once.
    now: bool,
    /// One after which the guest stays stopped.
    last: bool,
}

impl Protecting {
    pub(crate) fn new(overseer: Arc<dyn Overseer>, staging: Staging, pace: Pace) -> Self {
        Self {
            overseer,
            inbox: Inbox::default(),
            staging: Arc::new(staging),
            switch: GuestSwitch::default(),
            pace: Mutex::new(pace),
            counts: Mutex::default(),
            deltas: Arc::default(),
            sent: Arc::default(),
            wanted: Mutex::default(),
        }
    }

    /// Asks for a checkpoint at once; with `is_last` for one after which the guest stays stopped.
    pub(crate) fn want(&self, is_last: bool) {
        let mut wanted = self.wanted.lock();
        wanted.now = true;
        wanted.last |= is_last;
    }

    /// Whether one is asked for, and whether it is the last.
    pub(crate) fn wanted(&self) -> (bool, bool) {
        let wanted = *self.wanted.lock();
        (wanted.now, wanted.last)
    }

    /// Takes what was asked for: whether it is the last.
    pub(crate) fn take_wanted(&self) -> bool {
        std::mem::take(&mut *self.wanted.lock()).last
    }
}
