//! Statistics: everything that `info migrate` shows, and what it lacks, as typed values.
//!
//! Sync, scan and movement are timed apart, so that bandwidth means bytes over the time in which bytes moved.

use std::time::Duration;

use crate::events::{Status, SwitchoverStep};
use crate::throttle::DirtyLimitTimes;
use crate::time_forms::{list, optional, time};

/// A migration's figures at one instant. All byte counts are totals since it began.
///
/// Read from JSON, fields that are missing are 0 or unknown, fields that are not known are left alone, and a time may be a
/// number of seconds.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Statistics {
    /// Where it stands.
    pub status: Status,
    /// Why it failed, or what an operator must know (undecided).
    pub error: Option<String>,
    /// Since the start until the end or now.
    #[serde(deserialize_with = "time")]
    pub total_time: Duration,
    /// Connecting and exchanging headers.
    #[serde(deserialize_with = "time")]
    pub setup_time: Duration,
    /// The guest's pause, once it is known.
    #[serde(deserialize_with = "optional")]
    pub downtime: Option<Duration>,
    /// The pause expected if the switchover came now.
    #[serde(deserialize_with = "time")]
    pub expected_downtime: Duration,
    /// The pause's parts, in order.
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
    /// Pages sent as zero, without content.
    pub zero_pages: u64,
    /// Pages sent with content.
    pub normal_pages: u64,
    /// Pages found never populated; part of `zero_pages`.
    pub absent_pages: u64,
    /// Bytes per second while bytes moved: what all lanes together wrote, over the time that a lane spent writing.
    /// Harvests, scans, compression and waits are not in it. An average over the last seconds: half of it
    /// is of the last two.
    pub bandwidth_bytes: u64,
    /// Bytes per second that went out, all time counted, waits under `max-bandwidth` as well: what QEMU calls `mbps`. Of
    /// the last seconds while it runs, of all of it at its end.
    pub throughput_bytes: u64,
    /// Bytes of dirty memory per second that the lanes get rid of while they work, scans and compression included:
    /// what the time for the rest is reckoned with, unless `max-bandwidth` is less or `avail-switchover-bandwidth` stated.
    pub drain_bytes: u64,
    /// Pages that the guest dirties per second, as of the last round.
    pub dirty_pages_per_second: u64,
    /// Pages sent per second in the last window.
    pub pages_per_second: u64,
    /// Rounds begun (`dirty-sync-count`).
    pub rounds_begun: u64,
    /// Every finished round; of more than a few thousand, neighbours are told as one.
    pub rounds: Vec<Round>,
    /// About ten a second: for timelines.
    pub samples: Vec<Sample>,
    /// Channels that carry pages.
    pub channels: u32,
    /// Whether the peer is a Sterna.
    pub peer_is_sterna: Option<bool>,
    /// Share of the time, percent, that vCPUs are made to sleep (`auto-converge`).
    pub cpu_throttle_percent: u8,
    /// Whether each vCPU's dirty rate is held down (`dirty-limit`).
    pub is_dirty_limited: bool,
    /// What that does to the guest, as of the last look; None where it is not, or the VMM does not count it.
    pub dirty_limit_times: Option<DirtyLimitTimes>,
    /// Devices with a stream, in the VM's order.
    pub streams: Vec<StreamStatistics>,
}

/// What became of a device's stream, as one side sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct StreamStatistics {
    /// The device's section name.
    pub name: String,
    /// Its instance.
    pub instance: u32,
    /// Bytes of its stream, without configuration.
    pub bytes: u64,
    /// Of these, while the guest ran. Of a destination: 0.
    pub running_bytes: u64,
    /// Time in the device's calls: reading, or loading.
    #[serde(deserialize_with = "time")]
    pub working: Duration,
    /// Time that its thread waited: for buffers and room at the destination, or for bytes to come.
    #[serde(deserialize_with = "time")]
    pub waiting: Duration,
    /// Source: from the order to finish until all was read. Destination: from the first byte until all was loaded.
    #[serde(deserialize_with = "time")]
    pub took: Duration,
    /// Destination: loading its configuration, which can be done beside nothing.
    #[serde(deserialize_with = "time")]
    pub configuration: Duration,
    /// Destination: the most bytes that were held for it at once.
    pub peak_bytes: u64,
}

impl StreamStatistics {
    /// No figures yet.
    pub fn of(name: &str, instance: u32) -> Self {
        Self { name: name.to_owned(), instance, ..Self::default() }
    }
}

/// Where the time of harvesting dirty bits went.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct SyncParts {
    /// The kernel's: KVM's log or rings, PAGEMAP_SCAN.
    #[serde(deserialize_with = "time")]
    pub kernel: Duration,
    /// Reading and clearing the logs of vhost back ends.
    #[serde(deserialize_with = "time")]
    pub vhost: Duration,
    /// Merging bitmaps that begin on a word of their block's.
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
    /// Looking for zero pages.
    #[serde(deserialize_with = "time")]
    pub scan: Duration,
    /// Making pages ready to be read: re-arming their tracking, and finding those that were never populated.
    #[serde(deserialize_with = "time")]
    pub rearm: Duration,
    /// Compressing.
    #[serde(deserialize_with = "time")]
    pub encode: Duration,
    /// Writing, also of what says that pages are zero or that a pass ends: the time in which bytes moved.
    #[serde(deserialize_with = "time")]
    pub moving: Duration,
    /// Held back by the bandwidth limit.
    #[serde(deserialize_with = "time")]
    pub throttled: Duration,
    /// Waiting for pages: for a harvest, or for other lanes.
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
    /// Pages that it set out to send.
    pub pages: u64,
    /// Bytes it wrote.
    pub bytes: u64,
    /// What lanes did meanwhile.
    pub lanes: LaneTimes,
    /// Time that harvesting dirty bits took, most of it while lanes sent.
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

/// A destination's figures.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct IncomingStatistics {
    /// Where it stands.
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
