//! Counts of requested and sent pages after the switch, for the statistics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::stats::{Histogram, PostcopyChannel, PostcopyStatistics};

/// The counts of all threads that send pages. Sending a requested page takes no lock here.
#[derive(Debug, Default)]
pub(in crate::outgoing) struct Work {
    main: ChannelWork,
    preempt: ChannelWork,
    /// The lanes' counts, ordered by lane number.
    lanes: Mutex<Vec<(usize, Arc<ChannelWork>)>>,
    answers: Histogram,
    /// The arrival of the request being answered: nanoseconds since requests were possible, plus one.
    ///
    /// The value 0 means that the answer is not measured. Only one thread answers.
    answering: AtomicU64,
}

/// The counts of one channel.
#[derive(Debug, Default)]
pub(in crate::outgoing) struct ChannelWork {
    background_pages: AtomicU64,
    requested_pages: AtomicU64,
    bytes: AtomicU64,
}

impl Work {
    /// The counts of lane `index`.
    pub(super) fn lane(&self, index: usize) -> Arc<ChannelWork> {
        let mut lanes = self.lanes.lock();
        if let Some((_, work)) = lanes.iter().find(|(known, _)| *known == index) {
            return Arc::clone(work);
        }
        let work = Arc::<ChannelWork>::default();
        lanes.push((index, Arc::clone(&work)));
        lanes.sort_unstable_by_key(|(index, _)| *index);
        work
    }

    /// Adds background pages that were sent over the main channel.
    pub(in crate::outgoing) fn sent_background(&self, pages: u64, bytes: u64) {
        self.main.background(pages);
        add(&self.main.bytes, bytes);
    }

    /// Records that the rest of the request of time `at` is about to be sent.
    pub(super) fn answers(&self, at: Option<Duration>) {
        let nanos = at.map_or(0, |at| u64::try_from(at.as_nanos()).unwrap_or(u64::MAX - 1) + 1);
        self.answering.store(nanos, Ordering::Relaxed);
    }

    /// Adds requested pages that were sent. The times of requests count from `began`.
    pub(super) fn sent_requested(&self, began: Instant, is_preempt: bool, pages: u64, bytes: u64) {
        let work = if is_preempt { &self.preempt } else { &self.main };
        add(&work.requested_pages, pages);
        add(&work.bytes, bytes);
        if let Some(at) = self.answering.load(Ordering::Relaxed).checked_sub(1) {
            self.answers.add(began.elapsed().saturating_sub(Duration::from_nanos(at)));
        }
    }

    /// Writes the counts to the statistics `to`.
    pub(super) fn put(&self, to: &mut PostcopyStatistics) {
        let lanes = self.lanes.lock();
        let lanes = lanes.iter().map(|(index, work)| (format!("multifd {index}"), &**work));
        let channels = [("main".to_owned(), &self.main), ("preempt".to_owned(), &self.preempt)];
        to.channels = channels
            .into_iter()
            .chain(lanes)
            .map(|(name, work)| work.snapshot(name))
            .filter(|channel| channel.background_pages + channel.requested_pages > 0)
            .collect();
        to.answers = self.answers.snapshot();
    }
}

impl ChannelWork {
    pub(super) fn background(&self, pages: u64) {
        add(&self.background_pages, pages);
    }

    /// Sets the total bytes that the channel has carried since the switch.
    pub(super) fn carried(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    fn snapshot(&self, name: String) -> PostcopyChannel {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PostcopyChannel {
            name,
            background_pages: get(&self.background_pages),
            requested_pages: get(&self.requested_pages),
            sent_bytes: get(&self.bytes),
        }
    }
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}
