//! Statistics of a migration: everything that `info migrate` shows, and more, as typed values.
//!
//! Sync, scan and writing are timed separately. Therefore bandwidth is bytes over the time in which lanes wrote.

mod fault_series;
#[cfg(feature = "postcopy")]
mod histogram;
mod latencies;
mod postcopy;
mod reconnection;
#[cfg(feature = "postcopy")]
mod series;

use std::time::Duration;

use crate::events::{Status, SwitchoverStep};
use crate::throttle::DirtyLimitTimes;
pub use fault_series::FaultSeries;
#[cfg(feature = "postcopy")]
pub(crate) use histogram::Histogram;
pub use latencies::Latencies;
pub use postcopy::{PostcopyChannel, PostcopyStatistics};
pub use reconnection::{Reconnection, ReconnectionTotals};
#[cfg(feature = "postcopy")]
pub(crate) use series::Series;
pub use sterna_forecast::LaneTimes;
use sterna_forecast::time_forms::{list, optional, time, times};

/// A migration's statistics at one instant. All byte counts are totals since the migration began.
///
/// JSON input: missing fields are 0 or unknown, unknown fields are ignored, and a time may be a number of seconds.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Statistics {
    /// The migration's status at this instant.
    pub status: Status,
    /// Why the migration failed, or the message for the operator while it is undecided.
    pub error: Option<String>,
    /// Time from the start to the end, or to this instant.
    #[serde(deserialize_with = "time")]
    pub total_time: Duration,
    /// Time for connecting and exchanging headers.
    #[serde(deserialize_with = "time")]
    pub setup_time: Duration,
    /// The guest's downtime, when known.
    #[serde(deserialize_with = "optional")]
    pub downtime: Option<Duration>,
    /// The downtime expected if the switchover began now.
    #[serde(deserialize_with = "time")]
    pub expected_downtime: Duration,
    /// The downtime's steps with their durations, in order.
    #[serde(deserialize_with = "list")]
    pub switchover: Vec<(SwitchoverStep, Duration)>,
    /// RAM of the guest, bytes.
    pub ram_total_bytes: u64,
    /// Dirty bytes still to send.
    pub ram_remaining_bytes: u64,
    /// Bytes of the guest's memory that a server of this process must still place. Nothing is sent before. JSON omits 0.
    #[serde(skip_serializing_if = "is_zero")]
    pub missing_bytes: u64,
    /// Bytes written to all channels.
    pub transferred_bytes: u64,
    /// Part of `transferred_bytes` that was sent on multifd channels.
    pub multifd_bytes: u64,
    /// Part of `transferred_bytes` that was sent while the guest ran.
    pub precopy_bytes: u64,
    /// Part of `transferred_bytes` that was sent while the guest was stopped.
    pub downtime_bytes: u64,
    /// Part of `transferred_bytes` that was sent after the guest resumed at the destination. JSON omits this field
    /// and the next without postcopy.
    #[serde(skip_serializing_if = "is_zero")]
    pub postcopy_bytes: u64,
    /// Pages that the destination requested because a vCPU or another thread waited for them.
    #[serde(skip_serializing_if = "is_zero")]
    pub postcopy_requests: u64,
    /// Pages sent as zero, without content.
    pub zero_pages: u64,
    /// Pages sent with content.
    pub normal_pages: u64,
    /// Pages that were never populated; part of `zero_pages`.
    pub absent_pages: u64,
    /// Pages that were not sent in the first round because of a free page hint. JSON omits 0.
    #[serde(skip_serializing_if = "is_zero")]
    pub free_pages: u64,
    /// Bandwidth: bytes that all lanes wrote, per second of a lane's writing time. Time for syncs, scans, compression
    /// and waits does not count. Averaged with a half-life of 2 s.
    pub bandwidth_bytes: u64,
    /// Bytes sent per second of wall time, including waits under `max-bandwidth`; QEMU's `mbps`. Covers the last
    /// seconds while the migration runs, and the whole migration at its end.
    pub throughput_bytes: u64,
    /// Bytes of dirty memory per second that the lanes process, including scans and compression. It determines the
    /// estimated time for the remaining bytes, unless `max-bandwidth` is lower or `avail-switchover-bandwidth` is
    /// set.
    pub drain_bytes: u64,
    /// Pages that the guest dirties per second, measured in the last round.
    pub dirty_pages_per_second: u64,
    /// Pages sent per second in the last window.
    pub pages_per_second: u64,
    /// Rounds begun (`dirty-sync-count`).
    pub rounds_begun: u64,
    /// All ended rounds, finished or not. After a few thousand, neighbouring rounds are merged.
    pub rounds: Vec<Round>,
    /// Timeline of the migration: about ten samples per second.
    pub samples: Vec<Sample>,
    /// Number of channels that carry pages.
    pub channels: u32,
    /// Whether the peer is a Sterna; `None` if unknown.
    pub peer_is_sterna: Option<bool>,
    /// Percentage of the time that vCPUs sleep (`auto-converge`).
    pub cpu_throttle_percent: u8,
    /// Whether each vCPU's dirty rate is limited (`dirty-limit`).
    pub is_dirty_limited: bool,
    /// Effect of the dirty limits on the guest, measured at the last sync. `None` if no limit is set or the VMM does
    /// not measure it.
    pub dirty_limit_times: Option<DirtyLimitTimes>,
    /// Devices with a stream, in the VM's order.
    pub streams: Vec<StreamStatistics>,
    /// Statistics of RDMA; `None` over any other transport.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rdma: Option<RdmaStatistics>,
    /// Connections that were lost and replaced, oldest first; at most the last 256. JSON omits an empty list.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reconnections: Vec<Reconnection>,
    /// Totals of the connections that `reconnections` no longer contains. JSON omits them if there are none.
    #[serde(skip_serializing_if = "ReconnectionTotals::is_none")]
    pub earlier_reconnections: ReconnectionTotals,
    /// Time since the current loss of the connection; `None` while connected.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "optional")]
    pub disconnected: Option<Duration>,
    /// Statistics of postcopy. JSON omits them without postcopy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub postcopy: Option<PostcopyStatistics>,
}

impl Statistics {
    /// Totals over all connections that were lost and replaced.
    pub fn reconnection_totals(&self) -> ReconnectionTotals {
        let mut totals = self.earlier_reconnections;
        self.reconnections.iter().for_each(|reconnection| totals.add(reconnection));
        totals
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Statistics of the source of a migration over RDMA (specs/rdma.md §6).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct RdmaStatistics {
    /// RDMA WRITEs that were posted.
    pub writes: u64,
    /// Bytes that these WRITEs carried.
    pub written_bytes: u64,
    /// Bytes that are posted and whose completion has not been reported.
    pub in_flight_bytes: u64,
    /// Registrations of this side's guest memory.
    pub registrations: u64,
    /// Bytes of this side's guest memory that are registered now, and pinned. 0 if the adapter has on-demand paging.
    pub pinned_bytes: u64,
    /// Windows that the destination was asked to register.
    pub windows: u64,
    /// Bytes of the destination's memory that are registered at this side's request, as far as this side knows.
    /// Excludes blocks of which the destination pins nothing.
    pub destination_pinned_bytes: u64,
    /// Commands that were answered: one message in each direction.
    pub exchanges: u64,
    /// Messages for which the peer had posted no receive. More than 0 indicates an error.
    pub receiver_not_ready: u64,
}

/// Statistics of the destination of a migration over RDMA (specs/rdma.md §6).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct IncomingRdmaStatistics {
    /// Registrations of guest memory.
    pub registrations: u64,
    /// Bytes of guest memory that are registered now, and pinned. 0 if the adapter has on-demand paging.
    pub pinned_bytes: u64,
    /// Commands that were performed.
    pub commands: u64,
    /// Commands among these that announced a range of zero pages.
    pub zero_ranges: u64,
}

/// One side's statistics of a device stream.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct StreamStatistics {
    /// The device's section name.
    pub name: String,
    /// The device's instance, which distinguishes devices of one name.
    pub instance: u32,
    /// Bytes of the stream, without the configuration.
    pub bytes: u64,
    /// Part of `bytes` that was read while the guest ran. 0 at a destination.
    pub running_bytes: u64,
    /// Time in the device's calls: reading at the source, loading at the destination.
    #[serde(deserialize_with = "time")]
    pub working: Duration,
    /// Time that the device's thread waited: for buffers and room at the destination, or for bytes to arrive.
    #[serde(deserialize_with = "time")]
    pub waiting: Duration,
    /// Source: time from the request to finish until all bytes were read. Destination: time from the first byte until
    /// all bytes were loaded.
    #[serde(deserialize_with = "time")]
    pub took: Duration,
    /// Destination: time for loading the configuration, which cannot be loaded in parallel.
    #[serde(deserialize_with = "time")]
    pub configuration: Duration,
    /// Destination: the most bytes that were buffered for the device at any time.
    pub peak_bytes: u64,
}

impl StreamStatistics {
    /// Statistics of a device before its stream begins.
    pub fn of(name: &str, instance: u32) -> Self {
        Self { name: name.to_owned(), instance, ..Self::default() }
    }
}

/// The parts of a sync's duration.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct SyncParts {
    /// Time in the kernel: KVM's log or rings, PAGEMAP_SCAN.
    #[serde(deserialize_with = "time")]
    pub kernel: Duration,
    /// Time for reading and clearing the logs of vhost back ends.
    #[serde(deserialize_with = "time")]
    pub vhost: Duration,
    /// Time for merging bitmaps that are aligned to words of their block.
    #[serde(deserialize_with = "time")]
    pub aligned: Duration,
    /// Time for merging bitmaps that are not aligned.
    #[serde(deserialize_with = "time")]
    pub misaligned: Duration,
}

/// One round over the dirty pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Round {
    /// Number of the round, from 1.
    pub number: u64,
    /// Time from the migration's start to the round's start.
    #[serde(deserialize_with = "time")]
    pub began: Duration,
    /// Duration of the round.
    #[serde(deserialize_with = "time")]
    pub took: Duration,
    /// Pages to send in this round.
    pub pages: u64,
    /// Bytes that the round wrote.
    pub bytes: u64,
    /// Times of the lanes' activities during the round.
    pub lanes: LaneTimes,
    /// Duration of the sync. Most of it overlaps with sending.
    #[serde(deserialize_with = "time")]
    pub sync: Duration,
    /// The parts of the sync's duration.
    pub sync_parts: SyncParts,
    /// Pages that the sync at the round's end found dirty.
    pub dirtied_pages: u64,
    /// Time in which the guest dirtied these pages: from the previous sync to the one that found them. Zero, and
    /// omitted from JSON, if it was not measured.
    #[serde(skip_serializing_if = "Duration::is_zero", deserialize_with = "time")]
    pub dirtied_time: Duration,
    /// Whether the guest was stopped during the round.
    pub stopped: bool,
    /// Whether the round ended before all of its pages were sent. Reasons are a lost connection, a switch to
    /// postcopy, or the end of the migration. The guest's writes during such a round are unknown. JSON omits `false`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub unfinished: bool,
}

/// The state of a migration at one instant of its timeline.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Sample {
    /// Time since the migration's start.
    #[serde(deserialize_with = "time")]
    pub at: Duration,
    /// Bytes written so far to all channels.
    pub transferred_bytes: u64,
    /// Dirty bytes still to send.
    pub remaining_bytes: u64,
    /// Pages dirtied per second, as last measured.
    pub dirty_pages_per_second: u64,
}

/// Statistics of the destination.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct IncomingStatistics {
    /// The migration's status at the destination.
    pub status: Status,
    /// Why the migration failed.
    pub error: Option<String>,
    /// Bytes read from all channels.
    pub received_bytes: u64,
    /// Pages received with content.
    pub normal_pages: u64,
    /// Pages received as zero.
    pub zero_pages: u64,
    /// Part of `zero_pages` that had to be cleared, because the page was populated.
    pub cleared_pages: u64,
    /// Devices with a stream, in the VM's order.
    #[serde(default)]
    pub streams: Vec<StreamStatistics>,
    /// Statistics of RDMA; `None` over any other transport.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma: Option<IncomingRdmaStatistics>,
    /// Statistics of postcopy; `None` unless the guest runs before its pages arrive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub postcopy: Option<IncomingPostcopy>,
}

/// The destination's statistics of postcopy.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct IncomingPostcopy {
    /// Pages that have not arrived yet.
    pub missing_pages: u64,
    /// Requests that were sent, each for a page that a thread waited for.
    pub requests: u64,
    /// Waiting times; `None` unless `postcopy-blocktime` is on.
    pub times: Option<PostcopyTimes>,
    /// The requests over time, from the first moment at which a page could be waited for.
    #[serde(default)]
    pub faults: FaultSeries,
    /// Time from the start of `faults` until the guest was started.
    #[serde(default, deserialize_with = "optional")]
    pub started: Option<Duration>,
    /// Time from the start of `faults` until the last page arrived; `None` while pages are missing.
    #[serde(default, deserialize_with = "optional")]
    pub complete: Option<Duration>,
}

/// Waiting times for pages that the source had to send.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct PostcopyTimes {
    /// Time in which all vCPUs waited at the same time.
    #[serde(deserialize_with = "time")]
    pub blocktime: Duration,
    /// Total waiting time of each vCPU. Empty if the VMM does not name its vCPUs' threads.
    #[serde(deserialize_with = "times")]
    pub vcpu_blocktime: Vec<Duration>,
    /// Average waiting time for a page, over all threads.
    #[serde(deserialize_with = "time")]
    pub latency: Duration,
    /// Average waiting time for a page, for each vCPU.
    #[serde(deserialize_with = "times")]
    pub vcpu_latency: Vec<Duration>,
    /// Average waiting time for a page, over all threads that are not vCPUs.
    #[serde(deserialize_with = "time")]
    pub non_vcpu_latency: Duration,
    /// Number of waits per duration: bucket N counts waits from 2^N to 2^(N+1) microseconds.
    pub latency_buckets: Vec<u64>,
    /// The same waits in finer buckets.
    pub latencies: Latencies,
}

impl PostcopyTimes {
    /// Number of buckets. The last bucket counts the longest waits, over half an hour.
    pub const BUCKETS: usize = latencies::POWERS;
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
