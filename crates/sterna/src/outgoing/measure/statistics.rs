//! The statistics of a running migration, updated by its control thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna_ram::PAGE_SIZE;

use super::rdma_counts::RdmaCounts;
use super::throughput::Throughput;
use crate::events::{Status, SwitchoverStep};
use crate::order::RoundPages;
use crate::precopy::{Counts, HALF_LIFE, Meter, SHOWN_HALF_LIFE};
use crate::stats::{
    LaneTimes, PostcopyStatistics, Reconnection, ReconnectionTotals, Round, Sample, Statistics,
};
use crate::throttle::DirtyLimitTimes;

/// The most samples that are kept: 1.5 hours at ten per second. Beyond that, samples are thinned out.
const SAMPLES: usize = 50_000;

/// The most lost connections that are kept individually: pauses of a postcopy, and reconnections.
const PAUSES: usize = 256;

/// The most rounds that are kept individually.
const ROUNDS: usize = 4096;

pub(in crate::outgoing) struct LiveStatistics {
    began: Instant,
    status: Status,
    ended: Option<Duration>,
    setup: Option<Duration>,
    pub downtime: Option<Duration>,
    pub expected_downtime: Duration,
    pub switchover: Vec<(SwitchoverStep, Duration)>,
    ram_total_bytes: u64,
    /// Dirty bytes that syncs have found and that are in no round yet.
    pub next_round_bytes: u64,
    /// The round that was published last.
    pub round: Option<Arc<RoundPages>>,
    pub dirty_pages_per_second: u64,
    pub rounds_begun: u64,
    rounds: Vec<Round>,
    pub peer_is_sterna: Option<bool>,
    channels: u32,
    /// The time at which the destination acknowledged that it has the guest.
    pub acknowledged: Option<Instant>,
    /// The time at which the guest was stopped for the switchover.
    pub stopped_at: Option<Instant>,
    /// The counts when the guest stopped.
    pub at_stop: Option<Counts>,
    /// The counts when the guest resumed at the destination before its pages were there.
    pub at_start: Option<Counts>,
    /// Remaining bytes of pages that follow a guest that runs at the destination.
    pub following_bytes: u64,
    samples: Vec<Sample>,
    /// A meter with the settings of the policy's meter.
    meter: Meter,
    /// A meter with a longer half-life, for readers.
    shown: Meter,
    throughput: Throughput,
    pages_per_second: u64,
    pub cpu_throttle_percent: u8,
    pub is_dirty_limited: bool,
    pub dirty_limit_times: Option<DirtyLimitTimes>,
    rdma: Arc<RdmaCounts>,
    /// The last reconnections, oldest first, and totals of the earlier ones.
    reconnections: VecDeque<Reconnection>,
    earlier_reconnections: ReconnectionTotals,
    /// `Some` while the connection is lost: since when, and the facts so far.
    lost: Option<(Instant, Reconnection)>,
    /// `Some` from the switch to postcopy on.
    postcopy: Option<PostcopyStatistics>,
}

impl LiveStatistics {
    pub(crate) fn new(ram_total_bytes: u64, channels: u32, rdma: Arc<RdmaCounts>) -> Self {
        let now = Instant::now();
        Self {
            began: now,
            status: Status::Setup,
            ended: None,
            setup: None,
            downtime: None,
            expected_downtime: Duration::ZERO,
            switchover: Vec::new(),
            ram_total_bytes,
            next_round_bytes: ram_total_bytes,
            round: None,
            dirty_pages_per_second: 0,
            rounds_begun: 0,
            rounds: Vec::new(),
            peer_is_sterna: None,
            channels,
            acknowledged: None,
            stopped_at: None,
            at_stop: None,
            at_start: None,
            following_bytes: 0,
            samples: Vec::new(),
            meter: Meter::new(HALF_LIFE, channels),
            shown: Meter::new(SHOWN_HALF_LIFE, channels),
            throughput: Throughput::default(),
            pages_per_second: 0,
            cpu_throttle_percent: 0,
            is_dirty_limited: false,
            dirty_limit_times: None,
            rdma,
            reconnections: VecDeque::new(),
            earlier_reconnections: ReconnectionTotals::default(),
            lost: None,
            postcopy: None,
        }
    }

    /// Sets the status. Gives whether it differs from the earlier one. `counts` are the present ones.
    pub(crate) fn set_status(&mut self, status: Status, counts: Counts) -> bool {
        let is_new = self.status != status;
        self.status = status;
        if status == Status::Active {
            self.setup.get_or_insert(self.began.elapsed());
        }
        if matches!(status, Status::PostcopyActive | Status::Completed) {
            self.resume_postcopy();
        }
        // A reader that learns of the end asks for the statistics immediately.
        if status == Status::Completed {
            self.next_round_bytes = 0;
            self.following_bytes = 0;
            self.round = None;
            let end = self.acknowledged.unwrap_or_else(Instant::now);
            self.downtime = self.stopped_at.map(|stopped| end.saturating_duration_since(stopped));
        }
        if status.is_terminal() && self.ended.is_none() {
            // The statistics do not change from now on. The last window is often the only one.
            let end = self.clock();
            self.meter.close(end, counts);
            self.shown.close(end, counts);
            self.ended = Some(end);
        }
        is_new
    }

    /// The bytes that are still to be sent.
    fn remaining_bytes(&self) -> u64 {
        self.next_round_bytes
            + self.following_bytes
            + self.round.as_ref().map_or(0, |round| round.remaining_pages()) * PAGE_SIZE as u64
            + self.rdma.queued_bytes()
    }

    pub(crate) fn status(&self) -> Status {
        self.status
    }

    /// The time since the migration began.
    pub(crate) fn clock(&self) -> Duration {
        self.began.elapsed()
    }

    /// Begins the measurement when pages begin to move. Earlier bytes and waits do not count.
    pub(crate) fn begin_pages(&mut self, counts: Counts) {
        let now = self.clock();
        self.meter.restart(now, counts);
        self.shown.restart(now, counts);
    }

    /// Takes the counters' values, and closes a window that is long enough.
    pub(crate) fn observe(&mut self, counts: Counts) {
        let now = self.clock();
        self.meter.observe(now, counts);
        let Some((before, passed)) = self.shown.observe(now, counts) else { return };
        self.throughput = self.throughput.and(counts.bytes() - before.bytes(), passed);
        if counts.bytes() > before.bytes() {
            self.pages_per_second = per_second(counts.pages() - before.pages(), passed);
        }
        self.sample(counts);
    }

    /// Records a lost connection. Measurements of a switchover are dropped, because another one will follow.
    #[cfg(feature = "reconnect")]
    pub(crate) fn lose_connection(&mut self, counts: Counts, silent: Duration, why: String) {
        self.observe(counts);
        let at = self.clock().saturating_sub(silent);
        let reconnection = Reconnection { at, why, ..Reconnection::default() };
        let now = Instant::now();
        self.lost.get_or_insert((now.checked_sub(silent).unwrap_or(now), reconnection));
        if self.stopped_at.is_none() {
            self.forget_switchover();
        }
    }

    /// Records that a guest that was paused for a switchover runs again.
    pub(crate) fn stands_no_more(&mut self) {
        if let (Some((_, reconnection)), Some(stopped)) = (&mut self.lost, self.stopped_at) {
            reconnection.stood = Some(stopped.elapsed());
            self.forget_switchover();
        }
    }

    /// Records that the guest resumes at the destination and its pages follow.
    #[cfg(feature = "postcopy")]
    pub(crate) fn begin_postcopy(&mut self) {
        let at = self.clock();
        self.postcopy.get_or_insert_with(|| PostcopyStatistics { at, ..PostcopyStatistics::default() });
    }

    /// Records that no page is left to be sent.
    #[cfg(feature = "postcopy")]
    pub(crate) fn has_sent_all(&mut self) {
        let now = self.clock();
        self.postcopy.iter_mut().for_each(|postcopy| postcopy.all_sent = Some(now));
    }

    /// Records that the connection of a postcopy is lost. Failed attempts begin no new pause.
    #[cfg(feature = "postcopy")]
    pub(crate) fn pause_postcopy(&mut self, why: &str) {
        let at = self.clock();
        let Some(postcopy) = &mut self.postcopy else { return };
        postcopy.all_sent = None;
        let lost = || Reconnection { at, why: why.to_owned(), ..Reconnection::default() };
        postcopy.paused.get_or_insert_with(lost);
    }

    /// Records that `bytes` are sent again, because the destination has reported that it lacks them.
    #[cfg(feature = "postcopy")]
    pub(crate) fn resend_in_postcopy(&mut self, bytes: u64) {
        if let Some(paused) = self.postcopy.as_mut().and_then(|postcopy| postcopy.paused.as_mut()) {
            paused.resent_bytes += bytes;
        }
    }

    fn resume_postcopy(&mut self) {
        let now = self.clock();
        let Some(postcopy) = &mut self.postcopy else { return };
        if let Some(paused) = postcopy.paused.take() {
            let took = now.saturating_sub(paused.at);
            postcopy.recoveries += 1;
            postcopy.paused_time += took;
            if postcopy.pauses.len() >= PAUSES {
                postcopy.pauses.remove(0);
            }
            postcopy.pauses.push(Reconnection { took, ..paused });
        }
    }

    /// The time from the migration's start to `instant`.
    pub(crate) fn since_start(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.began)
    }

    fn postcopy(&self, now: Duration) -> Option<PostcopyStatistics> {
        let mut postcopy = self.postcopy.clone()?;
        if let Some(paused) = &mut postcopy.paused {
            paused.took = now.saturating_sub(paused.at);
        }
        Some(postcopy)
    }

    fn forget_switchover(&mut self) {
        (self.stopped_at, self.at_stop) = (None, None);
        self.switchover.clear();
    }

    /// Records a new connection, and the number of pages that are sent again.
    #[cfg(feature = "reconnect")]
    pub(crate) fn find_connection(&mut self, counts: Counts, resent_pages: u64) -> Reconnection {
        let (since, mut reconnection) =
            self.lost.take().unwrap_or_else(|| (Instant::now(), Reconnection::default()));
        reconnection.took = since.elapsed();
        reconnection.resent_bytes = resent_pages * PAGE_SIZE as u64;
        self.forget_switchover();
        self.begin_pages(counts);
        if self.reconnections.len() >= PAUSES
            && let Some(oldest) = self.reconnections.pop_front()
        {
            self.earlier_reconnections.add(&oldest);
        }
        self.reconnections.push_back(reconnection.clone());
        reconnection
    }

    /// Keeps a finished round. If there are too many, neighbouring rounds are combined.
    pub(crate) fn push_round(&mut self, round: Round) {
        if self.rounds.len() >= ROUNDS {
            self.rounds = self.rounds.chunks(2).map(joined).collect();
        }
        self.rounds.push(round);
    }

    /// The average time per lane and activity between two counts.
    pub(crate) fn lanes_between(&self, before: Counts, after: Counts) -> LaneTimes {
        (after.times - before.times) / self.channels
    }

    pub(crate) fn snapshot(&self, counts: Counts, error: Option<String>) -> Statistics {
        let at_stop = self.at_stop.unwrap_or(counts);
        let now = self.ended.unwrap_or_else(|| self.clock());
        Statistics {
            status: self.status,
            error,
            total_time: self.ended.unwrap_or_else(|| self.began.elapsed()),
            setup_time: self.setup.unwrap_or_else(|| self.began.elapsed()),
            downtime: self.downtime,
            expected_downtime: self.expected_downtime,
            switchover: self.switchover.clone(),
            ram_total_bytes: self.ram_total_bytes,
            ram_remaining_bytes: self.remaining_bytes(),
            transferred_bytes: counts.bytes(),
            multifd_bytes: counts.multifd_bytes,
            precopy_bytes: at_stop.bytes(),
            downtime_bytes: self.at_start.unwrap_or(counts).bytes() - at_stop.bytes(),
            postcopy_bytes: self.at_start.map_or(0, |at_start| counts.bytes() - at_start.bytes()),
            postcopy_requests: 0,
            zero_pages: counts.zero_pages,
            normal_pages: counts.normal_pages,
            absent_pages: counts.absent_pages,
            free_pages: 0,
            missing_bytes: 0,
            bandwidth_bytes: self.shown.pace(now, counts).bandwidth_bytes(),
            throughput_bytes: self.throughput(counts),
            drain_bytes: self.meter.pace(now, counts).drain_bytes(),
            dirty_pages_per_second: self.dirty_pages_per_second,
            pages_per_second: self.pages_per_second,
            rounds_begun: self.rounds_begun,
            rounds: self.rounds.clone(),
            samples: self.samples.clone(),
            channels: self.channels,
            peer_is_sterna: self.peer_is_sterna,
            cpu_throttle_percent: self.cpu_throttle_percent,
            is_dirty_limited: self.is_dirty_limited,
            dirty_limit_times: self.dirty_limit_times,
            streams: Vec::new(),
            rdma: None,
            reconnections: self.reconnections.iter().cloned().collect(),
            earlier_reconnections: self.earlier_reconnections,
            disconnected: self.lost.as_ref().map(|(since, _)| since.elapsed()),
            postcopy: self.postcopy(now),
        }
    }

    /// While the migration runs, the throughput of the last seconds. After its end, of all the time except the
    /// setup.
    fn throughput(&self, counts: Counts) -> u64 {
        let whole = |end: Duration| per_second(counts.bytes(), end.saturating_sub(self.setup.unwrap_or(end)));
        match (self.ended, self.throughput.bytes_per_second()) {
            (Some(end), _) => whole(end),
            // No window is complete yet, or nothing was sent for a long time.
            (None, 0) => whole(self.began.elapsed()),
            (None, shown) => shown,
        }
    }

    fn sample(&mut self, counts: Counts) {
        if self.samples.len() >= SAMPLES {
            let mut keep = false;
            self.samples.retain(|_| {
                keep = !keep;
                keep
            });
        }
        self.samples.push(Sample {
            at: self.began.elapsed(),
            transferred_bytes: counts.bytes(),
            remaining_bytes: self.remaining_bytes(),
            dirty_pages_per_second: self.dirty_pages_per_second,
        });
    }
}

/// Combines consecutive rounds into one.
fn joined(rounds: &[Round]) -> Round {
    let mut all = rounds[0];
    for next in &rounds[1..] {
        all = Round {
            number: next.number,
            took: all.took + next.took,
            pages: all.pages + next.pages,
            bytes: all.bytes + next.bytes,
            lanes: all.lanes + next.lanes,
            sync: all.sync + next.sync,
            sync_parts: all.sync_parts + next.sync_parts,
            dirtied_pages: next.dirtied_pages,
            dirtied_time: next.dirtied_time,
            stopped: next.stopped,
            unfinished: next.unfinished,
            began: all.began,
        };
    }
    all
}

/// `count` per second, for a count in `time`.
fn per_second(count: u64, time: Duration) -> u64 {
    if time.is_zero() {
        return 0;
    }
    (count as f64 / time.as_secs_f64()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_a_migration_shorter_than_a_window_have_its_bandwidth() {
        let mut statistics = LiveStatistics::new(1 << 20, 1, Arc::default());
        let mut counts = Counts { multifd_bytes: 4096 * 100, normal_pages: 100, ..Counts::default() };
        counts.times.moving = Duration::from_millis(1);

        statistics.set_status(Status::Completed, counts);

        let bandwidth = statistics.snapshot(counts, None).bandwidth_bytes;
        assert!(bandwidth.abs_diff(409_600_000) < 100, "{bandwidth}");
    }

    /// WRITEs complete in batches. While the next window is registered, no WRITE is in flight.
    #[test]
    fn readings_over_rdma_stay_within_a_fifth_under_a_steady_load() {
        const BATCH: u64 = 8 << 20;
        const BATCH_TIME: Duration = Duration::from_millis(8);
        let mut random = fastrand::Rng::with_seed(9);
        for (window, registering) in [(256u64 << 20, 60), (32 << 20, 9), (8 << 20, 3)] {
            let registering = Duration::from_millis(registering);
            let batches = window / BATCH;
            let link = BATCH * 125;
            let mean = (window as f64 / (BATCH_TIME * batches as u32 + registering).as_secs_f64()) as u64;
            let mut statistics = LiveStatistics::new(1 << 40, 1, Arc::default());
            statistics.set_status(Status::Active, Counts::default());
            let mut counts = Counts::default();
            let (mut batch, mut looked, mut readings) = (0, 0, 0);
            while looked < 100 {
                // The reading happens at a random time: some batches after the last one.
                for _ in 0..random.u64(10..20) {
                    let is_next_window = batch > 0 && batch % batches == 0;
                    statistics.began -= if is_next_window { BATCH_TIME + registering } else { BATCH_TIME };
                    batch += 1;
                    counts.main_bytes += BATCH;
                    counts.normal_pages += BATCH / 4096;
                    counts.times.moving += BATCH_TIME;
                }
                statistics.observe(counts);
                looked += 1;
                if looked <= 20 {
                    continue;
                }
                let shown = statistics.snapshot(counts, None);
                for (reading, truth) in [(shown.bandwidth_bytes, link), (shown.throughput_bytes, mean)] {
                    let ratio = reading as f64 / truth as f64;
                    assert!((0.8..=1.2).contains(&ratio), "window {window}: {reading} for {truth}");
                    readings += 1;
                }
            }
            assert_eq!(readings, 160);
        }
    }

    #[test]
    fn attempts_that_fail_are_one_pause_and_the_memory_of_very_many_is_bounded() {
        let mut statistics = LiveStatistics::new(1 << 30, 1, Arc::default());
        let none = Counts::default();
        statistics.pause_postcopy("before the switch");
        statistics.begin_postcopy();
        for count in 1..=300 {
            statistics.has_sent_all();
            statistics.pause_postcopy("cut");
            statistics.set_status(Status::PostcopyPaused, none);
            statistics.set_status(Status::PostcopyRecover, none);
            statistics.pause_postcopy("refused");
            statistics.set_status(Status::PostcopyPaused, none);
            let shown = statistics.snapshot(none, None).postcopy.unwrap();
            assert_eq!(shown.paused.map(|paused| paused.why).as_deref(), Some("cut"));
            assert_eq!((shown.all_sent, shown.recoveries), (None, count - 1));
            statistics.resend_in_postcopy(4096);
            statistics.set_status(Status::PostcopyActive, none);
        }

        let shown = statistics.snapshot(none, None).postcopy.unwrap();
        assert_eq!((shown.recoveries, shown.paused, shown.pauses.len()), (300, None, PAUSES));
        assert!(shown.pauses.iter().all(|pause| pause.resent_bytes == 4096 && pause.why == "cut"));
        assert!(shown.paused_time >= shown.pauses.iter().map(|pause| pause.took).sum::<Duration>());
    }

    #[test]
    fn very_many_reconnections_are_counted_and_the_last_are_kept() {
        let mut statistics = LiveStatistics::new(1 << 30, 1, Arc::default());
        for count in 1..=300_u64 {
            statistics.lose_connection(Counts::default(), Duration::ZERO, format!("cut {count}"));
            let stood = statistics.lost.as_mut().map(|(_, lost)| &mut lost.stood).unwrap();
            *stood = Some(Duration::from_millis(2));
            statistics.find_connection(Counts::default(), count);
            let totals = statistics.snapshot(Counts::default(), None).reconnection_totals();
            assert_eq!((totals.count, totals.resent_bytes), (count, count * (count + 1) / 2 * 4096));
        }

        let shown = statistics.snapshot(Counts::default(), None);
        assert_eq!((shown.reconnections.len(), shown.earlier_reconnections.count), (PAUSES, 44));
        assert_eq!((&*shown.reconnections[0].why, &*shown.reconnections[255].why), ("cut 45", "cut 300"));
        let totals = shown.reconnection_totals();
        assert_eq!(totals.stood, Duration::from_millis(600));
        assert!(totals.took >= shown.reconnections.iter().map(|one| one.took).sum::<Duration>());
        let json = serde_json::to_value(&shown).unwrap();
        assert_eq!(serde_json::from_value::<Statistics>(json).unwrap().reconnection_totals(), totals);
        let none = serde_json::to_value(Statistics::default()).unwrap();
        assert!(none.get("earlier_reconnections").is_none() && none.get("reconnections").is_none());
    }

    #[test]
    fn statistics_under_a_limit_show_what_went_out_and_not_how_fast_sockets_take_bursts() {
        let mut statistics = LiveStatistics::new(1 << 30, 1, Arc::default());
        statistics.set_status(Status::Active, Counts::default());
        // Windows of 100 ms: each has 500 kB within 0.2 ms.
        let mut counts = Counts::default();
        for _ in 0..5 {
            statistics.began -= crate::precopy::WINDOW;
            counts.multifd_bytes += 500_000;
            counts.normal_pages += 122;
            counts.times.moving += Duration::from_micros(200);
            statistics.observe(counts);
        }

        let shown = statistics.snapshot(counts, None);

        assert!(shown.bandwidth_bytes > 2_000_000_000, "{shown:?}");
        assert!(shown.throughput_bytes > 0 && shown.throughput_bytes <= 5_000_000, "{shown:?}");
    }
}
