//! State of an outgoing migration to a standby (`specs/replica.md §4`).
//!
//! The guest stays here, and checkpoints follow the seeding.
//!
//! The control thread takes the checkpoints ([`super::control`], `checkpoints`). The [`Overseer`] decides which
//! side may run the guest. The pages of a checkpoint wait in a [`Staging`] until they are sent.

mod delta;
mod inbox;
mod pace;
mod sent;
mod staging;
mod streams;
mod switch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_ram::GuestRam;
use sterna_wire::colo::Message;
use sterna_wire::replica::Output;

pub use delta::DeltaCounts;
pub(crate) use delta::{Coded, DeltaCache, Scratch};
pub(crate) use inbox::Inbox;
pub use pace::{CheckpointMode, MOST_IN_FLIGHT, Pace};
pub(crate) use pace::{Seen, counts_from, typical};
pub(crate) use sent::{SentPages, add_bytes, add_copied};
pub use staging::Staging;
pub(crate) use sterna_wire::replica::PageSums;
pub(crate) use streams::EpochStreams;
pub(crate) use switch::{GuestSwitch, Withholder};

use crate::error::MigrationError;
use crate::outgoing::guest_source::PageReader;

const RETURN_PATH: &str = "return path";

/// Decides which side may run the guest, and keeps its output back.
///
/// Output may leave after the checkpoint that includes it is held.
pub trait Overseer: Send + Sync {
    /// Whether another checkpoint may be taken now.
    ///
    /// The standby must be in contact and hold enough of the earlier checkpoints. `is_last`: the guest stays
    /// stopped after this checkpoint.
    fn may_take(&self, is_last: bool) -> bool;
    /// Ends an epoch: the guest is paused for checkpoint `number`. Gives the output that has not left yet.
    ///
    /// Output up to this call belongs to the epoch that ends, later output to the next one.
    fn end_epoch(&self, number: u64) -> Output;
    /// Checkpoint `number` was taken. Called while the guest is paused, before the checkpoint's end is handed to
    /// the transport.
    fn taken(&self, number: u64, is_last: bool) -> Result<(), MigrationError>;
    /// Whether the guest may run now. Called each time before a stopped guest is resumed.
    ///
    /// The lease may have ended meanwhile. After `false` the guest stays stopped until the overseer gives it
    /// back.
    fn may_guest_run(&self) -> bool;
    /// The time since which output waits that no checkpoint includes yet.
    fn output_waits_since(&self) -> Option<Instant>;
    /// The transport of the checkpoints has failed, or taking a checkpoint has.
    fn failed(&self, error: &MigrationError);
}

/// Counts of a protection.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Checkpoints that were taken.
    pub taken: u64,
    /// Checkpoints that the standby has promised to hold (RECEIVED).
    pub received: u64,
    /// Pages in all checkpoints, including zero pages.
    pub pages: u64,
    /// Bytes of device state in all checkpoints.
    pub device_bytes: u64,
    /// Checkpoints that did not fit the staging memory: they were sent in the pause.
    pub unstaged: u64,
    /// The typical duration of a pause at present.
    pub pause: Option<Duration>,
    /// The last pauses of the guest, newest last; at most [`LAST_PAUSES`].
    pub pauses: std::collections::VecDeque<Duration>,
    /// The time from the end of the last pause until RECEIVED.
    pub last_transfer: Duration,
    /// Pages of the last checkpoint.
    pub last_pages: u64,
}

/// The number of pauses that are kept, so that their distribution can be reported.
pub(crate) const LAST_PAUSES: usize = 1024;

/// Shared between a migration to a standby and the parts that protect the guest.
#[doc(hidden)]
pub struct Protecting {
    pub overseer: Arc<dyn Overseer>,
    pub(crate) inbox: Inbox,
    pub(crate) staging: Arc<dyn Staging>,
    pub(crate) switch: GuestSwitch,
    pub pace: Mutex<Pace>,
    pub counts: Mutex<Counts>,
    pub deltas: Arc<DeltaCounts>,
    pub(crate) sent: Arc<SentPages>,
    /// Streams of devices, from the seeding on. Only the control thread reads them.
    streams: Mutex<Option<Arc<EpochStreams>>>,
    /// A checkpoint that was requested and not taken yet.
    wanted: Mutex<Wanted>,
}

/// The kind of checkpoint that was requested.
#[derive(Debug, Clone, Copy, Default)]
struct Wanted {
    /// A checkpoint is requested immediately.
    now: bool,
    /// A checkpoint is requested after which the guest stays stopped.
    last: bool,
}

#[doc(hidden)]
impl Protecting {
    pub fn new(overseer: Arc<dyn Overseer>, staging: Arc<dyn Staging>, pace: Pace) -> Self {
        Self {
            overseer,
            inbox: Inbox::default(),
            staging,
            switch: GuestSwitch::default(),
            pace: Mutex::new(pace),
            counts: Mutex::default(),
            deltas: Arc::default(),
            sent: Arc::default(),
            streams: Mutex::default(),
            wanted: Mutex::default(),
        }
    }

    /// The streams of the devices; `None` if no device has a stream.
    pub(crate) fn streams(&self) -> Option<Arc<EpochStreams>> {
        self.streams.lock().clone()
    }

    pub(crate) fn set_streams(&self, streams: Option<EpochStreams>) {
        *self.streams.lock() = streams.map(Arc::new);
    }

    /// Takes the streams out. Later calls of [`Protecting::streams`] give `None`.
    pub(crate) fn take_streams(&self) -> Option<Arc<EpochStreams>> {
        self.streams.lock().take()
    }

    /// A reader of the pages that a lane sends.
    pub(crate) fn reader(&self) -> Arc<dyn PageReader> {
        self.staging.clone()
    }

    /// The transport of the checkpoints has failed because of `error`.
    pub(crate) fn fail(&self, error: MigrationError) {
        self.inbox.fail(error);
    }

    /// The sums of checkpoints' pages.
    pub(crate) fn sent(&self) -> Arc<SentPages> {
        Arc::clone(&self.sent)
    }

    /// A cache of at most `limit_bytes` for the differences that checkpoints of `ram` send.
    pub(crate) fn delta_cache(&self, ram: &GuestRam, limit_bytes: u64) -> Option<DeltaCache> {
        Some(DeltaCache::new(ram, limit_bytes, Arc::clone(&self.deltas)))
    }

    /// Takes the messages that `buffer` begins with from byte `position` of the return path. Gives their bytes.
    ///
    /// After the acknowledgement of a seeding the standby sends only COLO's messages.
    pub(crate) fn take_messages(&self, buffer: &mut Vec<u8>, position: u64) -> Result<u64, MigrationError> {
        let mut taken = 0;
        while let Some((message, used)) = Message::decode(buffer)
            .map_err(|error| MigrationError::wire(RETURN_PATH)(error.at(position + taken)))?
        {
            buffer.drain(..used);
            taken += used as u64;
            self.inbox.push(&message)?;
        }
        Ok(taken)
    }

    /// Why no further checkpoint can be taken.
    pub fn error(&self) -> Option<MigrationError> {
        self.inbox.error()
    }

    /// Requests a checkpoint immediately. With `is_last`, the guest stays stopped after it.
    pub fn want(&self, is_last: bool) {
        let mut wanted = self.wanted.lock();
        wanted.now = true;
        wanted.last |= is_last;
    }

    /// Whether a checkpoint is requested, and whether it is the last.
    pub fn wanted(&self) -> (bool, bool) {
        let wanted = *self.wanted.lock();
        (wanted.now, wanted.last)
    }

    /// Clears the request. Gives whether the requested checkpoint is the last.
    pub(crate) fn take_wanted(&self) -> bool {
        std::mem::take(&mut *self.wanted.lock()).last
    }
}
