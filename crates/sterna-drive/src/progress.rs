//! The answer to `query-migrate`, as far as QEMU and Sterna have the same members.

use serde_json::Value;
use sterna::RdmaStatistics;

/// A downtime from this value on (one year) is not a measurement.
const MOST_DOWNTIME_MS: u64 = 365 * 24 * 3600 * 1000;

/// State of a migration. Before the first migration all fields have their defaults.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Progress {
    /// The status under QEMU's name, or Sterna's `undecided` or `held`.
    pub status: String,
    /// Size of guest RAM, in bytes.
    pub total_bytes: u64,
    /// Dirty bytes still to send.
    pub remaining_bytes: u64,
    /// Before the first byte is sent: bytes of the guest's memory that its VM still loads from an image. Only Sterna
    /// reports them.
    pub missing_bytes: u64,
    /// Bytes sent so far.
    pub transferred_bytes: u64,
    /// Part of `transferred_bytes` that was sent on multifd channels.
    pub multifd_bytes: u64,
    /// Part of `transferred_bytes` that was sent while the guest ran.
    pub precopy_bytes: u64,
    /// Part of `transferred_bytes` that was sent while the guest was stopped.
    pub downtime_bytes: u64,
    /// Part of `transferred_bytes` that was sent after the guest was started at the destination.
    pub postcopy_bytes: u64,
    /// Pages that the destination requested because a vCPU or device waited for them.
    pub postcopy_requests: u64,
    /// Pages sent with content.
    pub normal_pages: u64,
    /// Pages sent as zero pages, without content.
    pub zero_pages: u64,
    /// Bandwidth in the last window, in bytes per second.
    pub bandwidth_bytes: f64,
    /// Bytes that the guest dirties per second.
    pub dirty_bytes_per_second: f64,
    /// Duration of connecting and exchanging headers, in milliseconds.
    pub setup_ms: u64,
    /// Milliseconds since the start, or in total after the end. None if the monitor does not report it.
    pub total_ms: Option<u64>,
    /// Expected downtime, or the measured one after the end, in milliseconds.
    pub downtime_ms: Option<u64>,
    /// Number of the round, from 1.
    pub round: u64,
    /// Percent of the time that vCPUs sleep because of `auto-converge`. None if they are not slowed down.
    pub throttle_percent: Option<u64>,
    /// RDMA statistics. Only Sterna reports them.
    pub rdma: Option<RdmaStatistics>,
    /// Lost connections. Only Sterna reports them.
    pub reconnect: Option<Reconnect>,
    /// The error, or a remark that an operator should read.
    pub error: Option<String>,
}

/// Lost connections of a migration, and their replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reconnect {
    /// Number of successful reconnections.
    pub reconnections: u64,
    /// Total bytes of pages that were sent again.
    pub resent_bytes: u64,
    /// While disconnected: milliseconds left to reconnect. None while connected.
    pub remaining_ms: Option<u64>,
}

impl Reconnect {
    fn from_query(query: &Value) -> Option<Self> {
        let told = query.get("x-sterna-reconnect")?;
        let number = |name: &str| told[name].as_u64();
        Some(Self {
            reconnections: number("reconnections").unwrap_or(0),
            resent_bytes: number("resent-bytes").unwrap_or(0),
            remaining_ms: number("disconnected").map(|_| number("remaining").unwrap_or(0)),
        })
    }
}

impl Progress {
    /// Reads an answer to `query-migrate`.
    pub fn from_query(query: &Value) -> Self {
        let ram = &query["ram"];
        let number = |name: &str| ram[name].as_u64().unwrap_or(0);
        let flag = |name: &str| query[name].as_bool().unwrap_or(false);
        let page = ram["page-size"].as_u64().unwrap_or(4096);
        Self {
            status: match query["status"].as_str().unwrap_or_default() {
                _ if flag("x-sterna-undecided") => "undecided".into(),
                _ if flag("x-sterna-held") => "held".into(),
                "" => "none".into(),
                status => status.into(),
            },
            total_bytes: number("total"),
            remaining_bytes: number("remaining"),
            missing_bytes: query["x-sterna-missing-bytes"].as_u64().unwrap_or(0),
            transferred_bytes: number("transferred"),
            multifd_bytes: number("multifd-bytes"),
            precopy_bytes: number("precopy-bytes"),
            downtime_bytes: number("downtime-bytes"),
            postcopy_bytes: number("postcopy-bytes"),
            postcopy_requests: number("postcopy-requests"),
            normal_pages: number("normal"),
            zero_pages: number("duplicate"),
            bandwidth_bytes: ram["mbps"].as_f64().unwrap_or(0.0) * 1e6 / 8.0,
            dirty_bytes_per_second: number("dirty-pages-rate") as f64 * page as f64,
            setup_ms: query["setup-time"].as_u64().unwrap_or(0),
            total_ms: query["total-time"].as_u64(),
            // A QEMU that sends nothing reports an expected downtime of 2^63 ms.
            downtime_ms: query["downtime"]
                .as_u64()
                .or(query["expected-downtime"].as_u64())
                .filter(|time| *time < MOST_DOWNTIME_MS),
            round: number("dirty-sync-count"),
            throttle_percent: query["cpu-throttle-percentage"].as_u64(),
            rdma: sterna_qmp::migration::rdma::from_query(query),
            reconnect: Reconnect::from_query(query),
            error: query["error-desc"].as_str().map(str::to_owned),
        }
    }

    /// Whether the migration has ended: no further change happens by itself.
    pub fn is_over(&self) -> bool {
        matches!(self.status.as_str(), "none" | "completed" | "failed" | "cancelled")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn progress_of_a_running_migration_has_bytes_per_second() {
        let query = json!({"status": "active", "expected-downtime": 40, "ram": {
            "total": 100, "remaining": 30, "mbps": 8.0, "dirty-pages-rate": 10, "page-size": 4096,
            "dirty-sync-count": 2, "transferred": 80}});

        let progress = Progress::from_query(&query);

        assert_eq!(progress.bandwidth_bytes, 1e6);
        assert_eq!(progress.dirty_bytes_per_second, 40960.0);
        assert_eq!((progress.round, progress.downtime_ms), (2, Some(40)));
        assert!(!progress.is_over());
    }

    #[test]
    fn progress_has_no_expected_downtime_where_qemu_expects_two_to_the_63_milliseconds() {
        let query = json!({"status": "device", "expected-downtime": i64::MAX});

        assert_eq!(Progress::from_query(&query).downtime_ms, None);
    }

    #[test]
    fn progress_tells_of_a_lost_connection_while_it_lasts() {
        let mut query = json!({"status": "active", "x-sterna-reconnect":
            {"reconnections": 1, "resent-bytes": 8192, "time": 700, "disconnected": 1500, "remaining": 58500}});

        let lost = Progress::from_query(&query).reconnect;
        query["x-sterna-reconnect"] = json!({"reconnections": 2, "resent-bytes": 8192, "time": 2300});
        let found = Progress::from_query(&query).reconnect;

        let both = Reconnect { reconnections: 1, resent_bytes: 8192, remaining_ms: Some(58_500) };
        assert_eq!(lost, Some(both));
        assert_eq!(found, Some(Reconnect { reconnections: 2, remaining_ms: None, ..both }));
        assert_eq!(Progress::from_query(&json!({"status": "active"})).reconnect, None);
    }

    #[test]
    fn progress_before_any_migration_is_none() {
        let progress = Progress::from_query(&json!({}));

        assert_eq!(progress.status, "none");
        assert!(progress.is_over());
    }

    #[test]
    fn progress_says_undecided_where_qemu_has_no_word() {
        let query = json!({"status": "device", "x-sterna-undecided": true, "error-desc": "lost"});

        let progress = Progress::from_query(&query);

        assert_eq!(progress.status, "undecided");
        assert!(!progress.is_over());
    }
}
