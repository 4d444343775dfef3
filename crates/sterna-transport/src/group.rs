//! Channels that belong together: silence on one of them is judged by all.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The channels of one migration. While bytes come on any of them, a read that waits on another has not stalled.
#[derive(Debug, Default)]
pub struct ChannelGroup {
    /// Reads that gave bytes, over all channels.
    reads: AtomicU64,
}

/// Says for how long nothing has come on any channel of a group.
#[derive(Debug)]
pub struct SilenceWatch {
    group: Arc<ChannelGroup>,
    reads: u64,
    since: Instant,
}

impl ChannelGroup {
    /// A group without channels: see [`crate::Channel::join`].
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Watches from now on.
    pub fn watch(self: &Arc<Self>) -> SilenceWatch {
        SilenceWatch {
            group: Arc::clone(self),
            reads: self.reads.load(Ordering::Relaxed),
            since: Instant::now(),
        }
    }

    pub(crate) fn note_read(&self) {
        self.reads.fetch_add(1, Ordering::Relaxed);
    }
}

impl SilenceWatch {
    /// For how long nothing has come, as far as this watch has looked: counted from the last look that found
    /// something new.
    pub fn silent_for(&mut self) -> Duration {
        let reads = self.group.reads.load(Ordering::Relaxed);
        if reads != self.reads {
            self.reads = reads;
            self.since = Instant::now();
        }
        self.since.elapsed()
    }
}

/// A call that waits: what it has to remember between the kernel's answers.
#[derive(Default)]
pub(crate) struct Wait {
    /// When the first call of this wait ended without moving anything.
    pub(crate) began: Option<Instant>,
    /// The group, from then on.
    pub(crate) others: Option<SilenceWatch>,
}
