//! Statistics: everything that `info migrate` shows, and more, as typed values.
//!
//! Sync, scan and writing are timed separately, so bandwidth is bytes over the time in which bytes moved.

mod histogram;
mod postcopy;
mod reconnection;
mod series;

use std::time::Duration;

use crate::events::{Status, SwitchoverStep};
use crate::throttle::DirtyLimitTimes;
use crate::time_forms::{list, optional, time, times};
pub(crate) use histogram::Histogram;
pub use histogram::Latencies;
pub use postcopy::{PostcopyChannel, PostcopyStatistics};
pub use reconnection::{Reconnection, ReconnectionTotals};
pub use series::FaultSeries;
pub(crate) use series::Series;

/// A migration's statistics at one instant. All byte counts are totals since it began.
///
/// When it is read from JSON, missing fields are 0 or unknown, unknown fields are ignored, and a time may be a number of
/// seconds.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Statistics {
    /// The status.
    pub status: Status,
    /// Why it failed, or what an operator must know (undecided).
    pub error: Option<String>,
    /// From the start to the end, or to now.
    #[serde(deserialize_with = "time")]
    pub total_time: Duration,
    /// Connecting and exchanging headers.
    #[serde(deserialize_with = "time")]
    pub setup_time: Duration,
    /// The guest's downtime, when it is known.
    #[serde(deserialize_with = "optional")]
    pub downtime: Option<Duration>,
    /// The downtime expected if the switchover began now.
    #[serde(deserialize_with = "time")]
    pub expected_downtime: Duration,
    /// The downtime's parts, in order.
    #[serde(deserialize_with = "list")]
    pub switchover: Vec<(SwitchoverStep, Duration)>,
    /// RAM of the guest, bytes.
    pub ram_total_bytes: u64,
    /// Dirty bytes still to send.
    pub ram_remaining_bytes: u64,
    /// Everything written to all channels, bytes.
    pub transferred_bytes: u64,
    /// Of these, on multifd channels.
    pub multifd_bytes: u64,
    /// Of these, while the guest ran.
    pub precopy_bytes: u64,
    /// Of these, while the guest was stopped.
    pub downtime_bytes: u64,
    /// Of these, after the guest went on at the destination. Left out of JSON without postcopy, as is the next.
    #[serde(skip_serializing_if = "is_zero")]
    pub postcopy_bytes: u64,
    /// Pages that the destination asked for, because something there waited for them.
    #[serde(skip_serializing_if = "is_zero")]
    pub postcopy_requests: u64,
    /// Pages sent as zero, without content.
    pub zero_pages: u64,
    /// Pages sent with content.
    pub normal_pages: u64,
    /// Pages found never populated; part of `zero_pages`.
    pub absent_pages: u64,
    /// Pages that were not sent in the first round because the guest said that it does not use them. Left out of JSON if there are
    /// none.
    #[serde(skip_serializing_if = "is_zero")]
    pub free_pages: u64,
    /// Bytes per second while bytes moved: what all lanes together wrote, over the time that a lane spent writing.
    /// Time for syncs, scans, compression and waits does not count. Averaged with a half-life of 2 s.
    pub bandwidth_bytes: u64,
    /// Bytes sent per second of wall time, including waits under `max-bandwidth`: what QEMU calls `mbps`. Over the last
    /// seconds while the migration runs, over all of it at its end.
    pub throughput_bytes: u64,
    /// Bytes of dirty memory per second that the lanes process, including scans and compression. The time for the remaining
    /// bytes is estimated with it, unless `max-bandwidth` is lower or `avail-switchover-bandwidth` is set.
    pub drain_bytes: u64,
    /// Pages that the guest dirties per second, measured in the last round.
    pub dirty_pages_per_second: u64,
    /// Pages sent per second in the last window.
    pub pages_per_second: u64,
    /// Rounds begun (`dirty-sync-count`).
    pub rounds_begun: u64,
    /// Every finished round; after a few thousand, neighbouring rounds are merged.
    pub rounds: Vec<Round>,
    /// About ten per second, for timelines.
    pub samples: Vec<Sample>,
    /// Channels that carry pages.
    pub channels: u32,
    /// Whether the peer is a Sterna.
    pub peer_is_sterna: Option<bool>,
    /// Per cent of the time that vCPUs sleep (`auto-converge`).
    pub cpu_throttle_percent: u8,
    /// Whether each vCPU's dirty rate is limited (`dirty-limit`).
    pub is_dirty_limited: bool,
    /// What that does to the guest, measured at the last sync; `None` if it is not limited or the VMM does not count it.
    pub dirty_limit_times: Option<DirtyLimitTimes>,
    /// Devices with a stream, in the VM's order.
    pub streams: Vec<StreamStatistics>,
    /// What RDMA did; `None` over any other transport.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma: Option<RdmaStatistics>,
    /// Connections that were lost and made anew, oldest first; of more than 256 the last. Left out of JSON if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reconnections: Vec<Reconnection>,
    /// Those that are not in `reconnections` any more. Left out of JSON if there are none.
    #[serde(skip_serializing_if = "ReconnectionTotals::is_none")]
    pub earlier_reconnections: ReconnectionTotals,
    /// Since when the connection is lost that is being made anew; `None` while there is one.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "optional")]
    pub disconnected: Option<Duration>,
    /// Of a guest that went on at the destination before its pages were there. Left out of JSON otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub postcopy: Option<PostcopyStatistics>,
}

impl Statistics {
    /// All connections that were lost and made anew, in sum.
    pub fn reconnection_totals(&self) -> ReconnectionTotals {
        let mut totals = self.earlier_reconnections;
        self.reconnections.iter().for_each(|reconnection| totals.add(reconnection));
        totals
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// What the source of a migration over RDMA did (specs/rdma.md §6).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct RdmaStatistics {
    /// WRITEs that were posted.
    pub writes: u64,
    /// Bytes that they carried.
    pub written_bytes: u64,
    /// Bytes that are posted and not known to be complete.
    pub in_flight_bytes: u64,
    /// Registrations of this side's guest memory.
    pub registrations: u64,
    /// Bytes of this side's guest memory that are registered now, and pinned: none where the adapter has on-demand paging.
    pub pinned_bytes: u64,
    /// Windows that the destination was asked to register.
    pub windows: u64,
    /// Bytes of the destination's memory that it was asked to register, and that are registered now as far as this side
    /// knows. None of blocks that it pins nothing of.
    pub destination_pinned_bytes: u64,
    /// Commands that were answered: a message there and one back.
    pub exchanges: u64,
    /// Messages for which the peer had posted no receive. 0 unless something is wrong.
    pub receiver_not_ready: u64,
}

/// What the destination of a migration over RDMA did (specs/rdma.md §6).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct IncomingRdmaStatistics {
    /// Registrations of guest memory.
    pub registrations: u64,
    /// Bytes of guest memory that are registered now, and pinned: none where the adapter has on-demand paging.
    pub pinned_bytes: u64,
    /// Commands that were carried out.
    pub commands: u64,
    /// Zero ranges among them.
    pub zero_ranges: u64,
}

/// One side's statistics of a device stream.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct StreamStatistics {
    /// The device's section name.
    pub name: String,
    /// Its instance.
    pub instance: u32,
    /// Bytes of its stream, without configuration.
    pub bytes: u64,
    /// Of these, while the guest ran. 0 at a destination.
    pub running_bytes: u64,
    /// Time in the device's calls: reading, or loading.
    #[serde(deserialize_with = "time")]
    pub working: Duration,
    /// Time that its thread waited: for buffers and room at the destination, or for bytes to come.
    #[serde(deserialize_with = "time")]
    pub waiting: Duration,
    /// Source: from the request to finish until all was read. Destination: from the first byte until all was loaded.
    #[serde(deserialize_with = "time")]
    pub took: Duration,
    /// Destination: loading its configuration, which cannot be done in parallel.
    #[serde(deserialize_with = "time")]
    pub configuration: Duration,
    /// Destination: the most bytes that were held for it at once.
    pub peak_bytes: u64,
}

impl StreamStatistics {
    /// Empty statistics.
    pub fn of(name: &str, instance: u32) -> Self {
        Self { name: name.to_owned(), instance, ..Self::default() }
    }
}

/// The parts of a sync's time.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct SyncParts {
    /// The kernel's: KVM's log or rings, PAGEMAP_SCAN.
    #[serde(deserialize_with = "time")]
    pub kernel: Duration,
    /// Reading and clearing the logs of vhost back ends.
    #[serde(deserialize_with = "time")]
    pub vhost: Duration,
    /// Merging bitmaps that are aligned to words of their block.
    #[serde(deserialize_with = "time")]
    pub aligned: Duration,
    /// Merging those that do not.
    #[serde(deserialize_with = "time")]
    pub misaligned: Duration,
}

/// What lanes did with their time: per lane, on average.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct LaneTimes {
    /// Scanning for zero pages.
    #[serde(deserialize_with = "time")]
    pub scan: Duration,
    /// Making pages ready to be read: re-arming their tracking, and finding those that were never populated.
    #[serde(deserialize_with = "time")]
    pub rearm: Duration,
    /// Compressing.
    #[serde(deserialize_with = "time")]
    pub encode: Duration,
    /// Writing, including zero-page lists and ends of rounds: the time in which bytes moved.
    #[serde(deserialize_with = "time")]
    pub moving: Duration,
    /// Waiting because of the bandwidth limit.
    #[serde(deserialize_with = "time")]
    pub throttled: Duration,
    /// Waiting for pages: for a sync, or for other lanes.
    #[serde(deserialize_with = "time")]
    pub idle: Duration,
}

/// One round over the dirty pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Round {
    /// From 1.
    pub number: u64,
    /// When it began, since the migration's start.
    #[serde(deserialize_with = "time")]
    pub began: Duration,
    /// How long it lasted.
    #[serde(deserialize_with = "time")]
    pub took: Duration,
    /// Pages to send in this round.
    pub pages: u64,
    /// Bytes it wrote.
    pub bytes: u64,
    /// What lanes did during the round.
    pub lanes: LaneTimes,
    /// Duration of the sync, most of it while lanes sent.
    #[serde(deserialize_with = "time")]
    pub sync: Duration,
    /// Its parts.
    pub sync_parts: SyncParts,
    /// Pages found dirty at its end.
    pub dirtied_pages: u64,
    /// Whether the guest was stopped.
    pub stopped: bool,
}

/// The state of a migration at one instant of its timeline.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Sample {
    /// Since the migration's start.
    #[serde(deserialize_with = "time")]
    pub at: Duration,
    /// All bytes written so far.
    pub transferred_bytes: u64,
    /// Still to send.
    pub remaining_bytes: u64,
    /// Pages dirtied per second, as last measured.
    pub dirty_pages_per_second: u64,
}

/// A destination's statistics.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct IncomingStatistics {
    /// The status.
    pub status: Status,
    /// Why it failed.
    pub error: Option<String>,
    /// Everything read from all channels, bytes.
    pub received_bytes: u64,
    /// Pages received with content.
    pub normal_pages: u64,
    /// Pages received as zero.
    pub zero_pages: u64,
    /// Of these, pages that had to be cleared.
    pub cleared_pages: u64,
    /// Devices with a stream, in the VM's order.
    #[serde(default)]
    pub streams: Vec<StreamStatistics>,
    /// What RDMA did; `None` over any other transport.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma: Option<IncomingRdmaStatistics>,
    /// Of a guest that runs before its pages are here; `None` as long as it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub postcopy: Option<IncomingPostcopy>,
}

/// A guest that runs before its pages are there, at its destination.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct IncomingPostcopy {
    /// Pages that are missing.
    pub missing_pages: u64,
    /// Requests that were sent: each for a page that somebody waited for.
    pub requests: u64,
    /// How long was waited; `None` unless `postcopy-blocktime` is on.
    pub times: Option<PostcopyTimes>,
    /// The same requests over time, from when pages could be waited for first.
    #[serde(default)]
    pub faults: FaultSeries,
    /// When the guest was started, from then on.
    #[serde(default, deserialize_with = "optional")]
    pub started: Option<Duration>,
    /// When the last page came, from then on; `None` while some are missing.
    #[serde(default, deserialize_with = "optional")]
    pub complete: Option<Duration>,
}

/// How long pages were waited for that had to come from the source.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct PostcopyTimes {
    /// For how long all vCPUs waited at once.
    #[serde(deserialize_with = "time")]
    pub blocktime: Duration,
    /// For how long each vCPU waited. Empty where the VMM does not name its vCPUs' threads.
    #[serde(deserialize_with = "times")]
    pub vcpu_blocktime: Vec<Duration>,
    /// How long a page was waited for, on average.
    #[serde(deserialize_with = "time")]
    pub latency: Duration,
    /// The same for each vCPU.
    #[serde(deserialize_with = "times")]
    pub vcpu_latency: Vec<Duration>,
    /// The same for all threads that are no vCPUs.
    #[serde(deserialize_with = "time")]
    pub non_vcpu_latency: Duration,
    /// How many waits lasted from 2^N to 2^(N+1) microseconds.
    pub latency_buckets: Vec<u64>,
    /// The same waits in finer buckets.
    pub latencies: Latencies,
}

impl PostcopyTimes {
    /// The longest waits have the last bucket: over half an hour.
    pub const BUCKETS: usize = histogram::POWERS;
}

impl LaneTimes {
    /// Time in which lanes worked: all but throttled and idle.
    pub fn busy(&self) -> Duration {
        self.scan + self.rearm + self.encode + self.moving
    }
}

impl std::ops::Add for LaneTimes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            scan: self.scan + other.scan,
            rearm: self.rearm + other.rearm,
            encode: self.encode + other.encode,
            moving: self.moving + other.moving,
            throttled: self.throttled + other.throttled,
            idle: self.idle + other.idle,
        }
    }
}

impl std::ops::Sub for LaneTimes {
    type Output = Self;
    fn sub(self, earlier: Self) -> Self {
        Self {
            scan: self.scan.saturating_sub(earlier.scan),
            rearm: self.rearm.saturating_sub(earlier.rearm),
            encode: self.encode.saturating_sub(earlier.encode),
            moving: self.moving.saturating_sub(earlier.moving),
            throttled: self.throttled.saturating_sub(earlier.throttled),
            idle: self.idle.saturating_sub(earlier.idle),
        }
    }
}

impl std::ops::Div<u32> for LaneTimes {
    type Output = Self;
    fn div(self, by: u32) -> Self {
        let by = by.max(1);
        Self {
            scan: self.scan / by,
            rearm: self.rearm / by,
            encode: self.encode / by,
            moving: self.moving / by,
            throttled: self.throttled / by,
            idle: self.idle / by,
        }
    }
}

impl std::ops::AddAssign<sterna_ram::dirty::SyncTimes> for SyncParts {
    fn add_assign(&mut self, times: sterna_ram::dirty::SyncTimes) {
        self.kernel += times.kernel;
        self.vhost += times.vhost;
        self.aligned += times.aligned;
        self.misaligned += times.misaligned;
    }
}

impl std::ops::Add for SyncParts {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            kernel: self.kernel + other.kernel,
            vhost: self.vhost + other.vhost,
            aligned: self.aligned + other.aligned,
            misaligned: self.misaligned + other.misaligned,
        }
    }
}
