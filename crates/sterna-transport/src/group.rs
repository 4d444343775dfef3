//! Groups of channels, such as those of one migration. A silent channel has not stalled while another of its group
//! receives bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The channels of one migration. While any of them receives bytes, a read that waits on another has not stalled.
#[derive(Debug, Default)]
pub struct ChannelGroup {
    /// Number of reads that returned bytes, over all channels.
    reads: AtomicU64,
}

/// Measures for how long no channel of a group has received a byte.
#[derive(Debug)]
pub struct SilenceWatch {
    group: Arc<ChannelGroup>,
    reads: u64,
    since: Instant,
}

impl ChannelGroup {
    /// A group without channels; they join with [`crate::Channel::join`].
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Starts to measure silence.
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
    /// Time since this watch last noticed that a channel of the group had received bytes.
    ///
    /// The watch notices them only when this function is called.
    pub fn silent_for(&mut self) -> Duration {
        let reads = self.group.reads.load(Ordering::Relaxed);
        if reads != self.reads {
            self.reads = reads;
            self.since = Instant::now();
        }
        self.since.elapsed()
    }
}

/// State that a blocked call keeps between two system calls.
#[derive(Default)]
pub(crate) struct Wait {
    /// Time when the first system call of this wait returned without moving a byte.
    pub(crate) began: Option<Instant>,
    /// The silence of the group since then.
    pub(crate) others: Option<SilenceWatch>,
}
