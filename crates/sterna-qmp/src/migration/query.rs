//! Answers `query-migrate`: the engine's statistics under QEMU's names (specs/stream.md §8).

use std::time::Duration;

use serde_json::{Map, Value, json};
use sterna::ram::PAGE_SIZE;
use sterna::stats::PostcopyTimes;
use sterna::{IncomingStatistics, Statistics, Status};

use super::address;
use super::engine::Receiving;
use super::rdma;

/// QEMU's name of `status`. QEMU has no names for *undecided* and *held*: see [`crate::migration`].
pub fn status_word(status: Status) -> &'static str {
    match status {
        Status::None => "none",
        Status::Setup => "setup",
        Status::Cancelling => "cancelling",
        Status::Cancelled => "cancelled",
        Status::Active => "active",
        Status::PreSwitchover => "pre-switchover",
        Status::Device | Status::Undecided => "device",
        Status::PostcopyDevice => "postcopy-device",
        Status::PostcopyActive => "postcopy-active",
        Status::PostcopyPaused => "postcopy-paused",
        Status::PostcopyRecover => "postcopy-recover",
        Status::Colo => "colo",
        Status::Completed | Status::Held => "completed",
        Status::Failing => "failing",
        Status::Failed => "failed",
        // A status of a later engine: the migration runs, because its end would have been reported.
        _ => "active",
    }
}

/// All results of [`status_word`].
pub(super) const STATUS_WORDS: &[&str] = &[
    "none",
    "setup",
    "cancelling",
    "cancelled",
    "active",
    "pre-switchover",
    "device",
    "postcopy-device",
    "postcopy-active",
    "postcopy-paused",
    "postcopy-recover",
    "colo",
    "completed",
    "failing",
    "failed",
];

/// The answer of a source. `downtime_limit`: the parameter. `window`: the reconnect window.
pub(crate) fn outgoing(statistics: &Statistics, downtime_limit: Duration, window: Duration) -> Value {
    let mut info = Map::new();
    let status = statistics.status;
    if status == Status::None {
        return info.into();
    }
    info.insert("status".into(), status_word(status).into());
    info.insert("total-time".into(), milliseconds(statistics.total_time));
    if status == Status::Setup && statistics.missing_bytes > 0 {
        info.insert("x-sterna-missing-bytes".into(), statistics.missing_bytes.into());
    }
    if status != Status::Setup {
        info.insert("setup-time".into(), milliseconds(statistics.setup_time));
        info.insert("ram".into(), ram(statistics));
        if status == Status::Completed {
            let downtime = statistics.downtime.unwrap_or_default();
            info.insert("downtime".into(), milliseconds(downtime));
        } else {
            // Before the first sync there is no estimate, so the downtime limit is reported.
            let expected = Some(statistics.expected_downtime).filter(|expected| !expected.is_zero());
            info.insert("expected-downtime".into(), milliseconds(expected.unwrap_or(downtime_limit)));
        }
    }
    if statistics.cpu_throttle_percent > 0 && !status.is_terminal() {
        info.insert("cpu-throttle-percentage".into(), statistics.cpu_throttle_percent.into());
    }
    if let Some(times) = statistics.dirty_limit_times.filter(|_| !status.is_terminal()) {
        let per_round = microseconds(times.throttled_per_round);
        info.insert("dirty-limit-throttle-time-per-round".into(), per_round);
        info.insert("dirty-limit-ring-full-time".into(), microseconds(times.ring_full));
    }
    if let Some(rdma) = &statistics.rdma {
        info.insert("x-sterna-rdma".into(), rdma::outgoing(rdma));
    }
    if let Some(reconnect) = reconnect(statistics, window) {
        info.insert("x-sterna-reconnect".into(), reconnect);
    }
    if let Some(error) = &statistics.error {
        info.insert("error-desc".into(), error.as_str().into());
    }
    if status == Status::PostcopyPaused {
        info.entry("error-desc").or_insert_with(|| PAUSED.into());
    }
    if status == Status::Undecided {
        info.insert("x-sterna-undecided".into(), true.into());
        info.entry("error-desc").or_insert_with(|| UNDECIDED.into());
    }
    info.into()
}

pub(crate) const UNDECIDED: &str = "the destination's acknowledgement was lost: the guest stays stopped here, because \
                                    it may run there. This side asks the destination again; or find out yourself \
                                    which side has the guest, and use 'x-sterna-decide'";

pub(crate) const PAUSED: &str = "the connection broke in postcopy: the guest is at the destination, and waits when it \
                                 needs a page that only this VM has. Keep this VM. 'migrate' with 'resume' continues \
                                 the migration. If 'query-migrate' at the destination shows 'completed', or the guest \
                                 is lost, use 'x-sterna-decide'";

/// The answer of a destination.
pub(crate) fn incoming(receiving: &dyn Receiving) -> Value {
    let IncomingStatistics { status, error, rdma, postcopy, .. } = receiving.statistics();
    let mut info = Map::new();
    // QEMU reports `setup` after `migrate-incoming`.
    let status = if status == Status::None { Status::Setup } else { status };
    info.insert("status".into(), status_word(status).into());
    if matches!(status, Status::Setup | Status::Active | Status::PostcopyActive) {
        let (name, address) = address::to_member(&receiving.address());
        info.insert(name.into(), address);
    }
    if let Some(error) = error {
        info.insert("error-desc".into(), error.into());
    }
    if status == Status::Held {
        info.insert("x-sterna-held".into(), true.into());
    }
    if let Some(rdma) = rdma {
        info.insert("x-sterna-rdma".into(), rdma::incoming(&rdma));
    }
    if let Some(times) = postcopy.and_then(|postcopy| postcopy.times) {
        blocktime(&times, &mut info);
    }
    info.into()
}

/// Lost connections. `None` if there was none. While the connection is lost, `disconnected` has the milliseconds since
/// the loss, and `remaining` the milliseconds until the migration is given up.
fn reconnect(statistics: &Statistics, window: Duration) -> Option<Value> {
    let totals = statistics.reconnection_totals();
    let disconnected = statistics.disconnected;
    if totals.count == 0 && disconnected.is_none() {
        return None;
    }
    let mut shown = json!({
        "reconnections": totals.count,
        "resent-bytes": totals.resent_bytes,
        "time": milliseconds(totals.took),
    });
    if let Some(since) = disconnected {
        shown["disconnected"] = milliseconds(since);
        shown["remaining"] = milliseconds(window.saturating_sub(since));
    }
    Some(shown)
}

/// Adds the members of the capability `postcopy-blocktime`.
fn blocktime(times: &PostcopyTimes, info: &mut Map<String, Value>) {
    let nanoseconds = |time: Duration| Value::from(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    info.insert("postcopy-blocktime".into(), milliseconds(times.blocktime));
    let of_vcpus: Value = times.vcpu_blocktime.iter().map(|time| milliseconds(*time)).collect();
    info.insert("postcopy-vcpu-blocktime".into(), of_vcpus);
    info.insert("postcopy-latency".into(), nanoseconds(times.latency));
    info.insert("postcopy-latency-dist".into(), times.latency_buckets.clone().into());
    let of_vcpus: Value = times.vcpu_latency.iter().map(|time| nanoseconds(*time)).collect();
    info.insert("postcopy-vcpu-latency".into(), of_vcpus);
    info.insert("postcopy-non-vcpu-latency".into(), nanoseconds(times.non_vcpu_latency));
}

fn ram(statistics: &Statistics) -> Value {
    json!({
        "transferred": statistics.transferred_bytes,
        "remaining": statistics.ram_remaining_bytes,
        "total": statistics.ram_total_bytes,
        "duplicate": statistics.zero_pages,
        "normal": statistics.normal_pages,
        "normal-bytes": statistics.normal_pages.saturating_mul(PAGE_SIZE as u64),
        "dirty-pages-rate": statistics.dirty_pages_per_second,
        "mbps": statistics.throughput_bytes as f64 * 8.0 / 1e6,
        "dirty-sync-count": statistics.rounds_begun,
        "page-size": PAGE_SIZE,
        "multifd-bytes": statistics.multifd_bytes,
        "pages-per-second": statistics.pages_per_second,
        "precopy-bytes": statistics.precopy_bytes,
        "downtime-bytes": statistics.downtime_bytes,
        "postcopy-bytes": statistics.postcopy_bytes,
        "dirty-sync-missed-zero-copy": 0,
        "postcopy-requests": statistics.postcopy_requests,
    })
}

fn microseconds(time: Duration) -> Value {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX).into()
}

fn milliseconds(time: Duration) -> Value {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX).into()
}
