//! Measures how long threads wait for pages (`postcopy-blocktime`).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_ram::missing_pages::Fault;

use crate::stats::{Histogram, PostcopyTimes};

/// A page: its block, and the first page of the backing memory's page.
type Place = (usize, u64);

/// Measures the waiting time of vCPUs and other threads.
#[derive(Debug, Default)]
pub(crate) struct Blocktime(Mutex<Measured>);

#[derive(Debug, Default)]
struct Measured {
    /// The waiting threads, the start of each wait, and the page. One thread waits for one page.
    waiting: HashMap<u32, (Instant, Place)>,
    /// The vCPUs' threads, and the waits of each.
    vcpus: Vec<(u32, Waited)>,
    /// The waits of all other threads.
    others: Waited,
    /// The time from which on every vCPU waits.
    all_since: Option<Instant>,
    /// The total time in which all vCPUs waited at the same time.
    all: Duration,
    waits: Histogram,
}

#[derive(Debug, Default, Clone, Copy)]
struct Waited {
    count: u64,
    time: Duration,
}

impl Waited {
    fn add(&mut self, time: Duration) {
        self.count += 1;
        self.time += time;
    }

    fn and(self, other: Self) -> Self {
        Self { count: self.count + other.count, time: self.time + other.time }
    }

    fn average(self) -> Duration {
        self.time.checked_div(self.count as u32).unwrap_or_default()
    }
}

impl Blocktime {
    /// Names the threads that are vCPUs.
    pub(crate) fn name_vcpus(&self, threads: &[u32]) {
        let vcpus = threads.iter().map(|thread| (*thread, Waited::default())).collect();
        self.0.lock().vcpus = vcpus;
    }

    /// A thread waits for a page that the source must send.
    pub(crate) fn waits(&self, fault: &Fault) {
        let now = Instant::now();
        let mut measured = self.0.lock();
        measured.waiting.entry(fault.thread).or_insert((now, (fault.block, fault.first)));
        if measured.all_since.is_none() && measured.are_all_waiting() {
            measured.all_since = Some(now);
        }
    }

    /// `count` pages from `first` on are in place.
    pub(crate) fn came(&self, block: usize, first: u64, count: u64) {
        let now = Instant::now();
        let mut measured = self.0.lock();
        let is_there = |place: &Place| place.0 == block && (first..first + count).contains(&place.1);
        let done: Vec<_> = measured.waiting.extract_if(|_, (_, wanted)| is_there(wanted)).collect();
        for (thread, (since, _)) in &done {
            measured.ended(*thread, now.saturating_duration_since(*since));
        }
        if !measured.are_all_waiting()
            && let Some(since) = measured.all_since.take()
        {
            measured.all += now.saturating_duration_since(since);
        }
    }

    pub(crate) fn snapshot(&self) -> PostcopyTimes {
        let measured = self.0.lock();
        let vcpus = || measured.vcpus.iter().map(|(_, waited)| *waited);
        PostcopyTimes {
            blocktime: measured.all,
            vcpu_blocktime: vcpus().map(|waited| waited.time).collect(),
            vcpu_latency: vcpus().map(Waited::average).collect(),
            latency: vcpus().fold(measured.others, Waited::and).average(),
            non_vcpu_latency: measured.others.average(),
            latency_buckets: measured.waits.by_powers(),
            latencies: measured.waits.snapshot(),
        }
    }
}

impl Measured {
    fn are_all_waiting(&self) -> bool {
        !self.vcpus.is_empty() && self.vcpus.iter().all(|(thread, _)| self.waiting.contains_key(thread))
    }

    fn ended(&mut self, thread: u32, time: Duration) {
        self.waits.add(time);
        match self.vcpus.iter_mut().find(|(vcpu, _)| *vcpu == thread) {
            Some((_, waited)) => waited.add(time),
            None => self.others.add(time),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(thread: u32, first: u64) -> Fault {
        let mut fault = Fault::default();
        (fault.first, fault.count, fault.thread) = (first, 1, thread);
        fault
    }

    #[test]
    fn waits_are_counted_by_who_waits_and_all_vcpus_together_only_while_all_wait() {
        let times = Blocktime::default();
        times.name_vcpus(&[1, 2]);
        times.waits(&fault(1, 5));
        times.waits(&fault(9, 5));
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(times.snapshot().blocktime, Duration::ZERO, "one vCPU runs");
        times.waits(&fault(2, 6));
        std::thread::sleep(Duration::from_millis(2));
        times.came(0, 5, 1);
        times.came(0, 6, 1);

        let got = times.snapshot();

        assert!(got.blocktime >= Duration::from_millis(2), "{got:?}");
        assert!(got.vcpu_blocktime[0] >= got.vcpu_blocktime[1] && got.vcpu_blocktime.len() == 2, "{got:?}");
        assert!(got.non_vcpu_latency >= Duration::from_millis(4), "{got:?}");
        assert_eq!(got.latency_buckets.iter().sum::<u64>(), 3);
        assert_eq!((got.latency_buckets.len(), got.latencies.count), (PostcopyTimes::BUCKETS, 3));
        assert!(
            got.latency_buckets[..10].iter().all(|count| *count == 0),
            "none within a millisecond: {got:?}"
        );
    }
}
