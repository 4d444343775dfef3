//! What `query-migrate` says, as far as both kinds of monitor say it.

use serde_json::Value;
use sterna::RdmaStatistics;

/// How a migration stands. Nothing yet: all default.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Progress {
    /// QEMU's word; `undecided` and `held` where Sterna says so.
    pub status: String,
    /// Guest RAM, bytes.
    pub total_bytes: u64,
    /// Dirty bytes still to send.
    pub remaining_bytes: u64,
    /// Written so far.
    pub transferred_bytes: u64,
    /// Of these, on multifd channels.
    pub multifd_bytes: u64,
    /// Of these, while the guest ran.
    pub precopy_bytes: u64,
    /// Of these, while the guest was stopped.
    pub downtime_bytes: u64,
    /// Pages sent with content.
    pub normal_pages: u64,
    /// Pages sent as zero.
    pub zero_pages: u64,
    /// Bytes per second in the last window.
    pub bandwidth_bytes: f64,
    /// Bytes that the guest dirties per second.
    pub dirty_bytes_per_second: f64,
    /// Milliseconds of connecting and exchanging headers.
    pub setup_ms: u64,
    /// Milliseconds since the start, or in all; none where the monitor does not say.
    pub total_ms: Option<u64>,
    /// Milliseconds expected, or had.
    pub downtime_ms: Option<u64>,
    /// From 1.
    pub round: u64,
    /// What RDMA did; only a Sterna says.
    pub rdma: Option<RdmaStatistics>,
    /// Connections that were lost; only a Sterna says.
    pub reconnect: Option<Reconnect>,
    /// Why it failed, or what must be known.
    pub error: Option<String>,
}

/// Connections that were lost, and are or were made anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reconnect {
    /// How often one was made anew.
    pub reconnections: u64,
    /// Bytes of pages that were sent again in all.
    pub resent_bytes: u64,
    /// There is none now, and so many milliseconds are left to make it anew.
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
    /// Reads what `query-migrate` returned.
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
            transferred_bytes: number("transferred"),
            multifd_bytes: number("multifd-bytes"),
            precopy_bytes: number("precopy-bytes"),
            downtime_bytes: number("downtime-bytes"),
            normal_pages: number("normal"),
            zero_pages: number("duplicate"),
            bandwidth_bytes: ram["mbps"].as_f64().unwrap_or(0.0) * 1e6 / 8.0,
            dirty_bytes_per_second: number("dirty-pages-rate") as f64 * page as f64,
            setup_ms: query["setup-time"].as_u64().unwrap_or(0),
            total_ms: query["total-time"].as_u64(),
            downtime_ms: query["downtime"].as_u64().or(query["expected-downtime"].as_u64()),
            round: number("dirty-sync-count"),
            rdma: crate::migration::rdma::from_query(query),
            reconnect: Reconnect::from_query(query),
            error: query["error-desc"].as_str().map(str::to_owned),
        }
    }

    /// Whether nothing more will happen by itself.
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
