//! Why a migration does not converge, and the settings that may help.

use std::time::Duration;

/// The measured rates of a migration that does not converge, and possible remedies.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the guest dirties {:.0} MB/s, {:.0} MB/s can be sent{}, and the downtime would be {:.0} ms where the downtime limit is \
     {} ms. {}{}",
    megabytes(*dirtied_bytes_per_second),
    megabytes(*sendable_bytes_per_second),
    if *is_bandwidth_limited { " under the bandwidth limit" } else { "" },
    downtime.as_secs_f64() * 1e3,
    downtime_limit.as_millis(),
    of_streams(*device_streams),
    sentence(remedies)
)]
#[non_exhaustive]
pub struct NoConvergence {
    /// Bytes per second that the guest dirties.
    pub dirtied_bytes_per_second: u64,
    /// Bytes per second of dirty memory that can be sent.
    pub sendable_bytes_per_second: u64,
    /// Whether the operator's bandwidth limit, and not the link, determines that rate.
    pub is_bandwidth_limited: bool,
    /// The downtime if the guest were paused now.
    pub downtime: Duration,
    /// The operator's limit for the downtime.
    pub downtime_limit: Duration,
    /// The part of the downtime that device streams alone take. Further rounds do not shorten it.
    pub device_streams: Duration,
    /// Settings that are not in use yet, and may help.
    pub remedies: Vec<Remedy>,
}

/// A change, by an operator, after which a migration may converge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Remedy {
    /// A longer downtime.
    #[error("raise the downtime limit")]
    RaiseDowntimeLimit,
    /// A higher limit than the operator's for the bandwidth.
    #[error("raise the bandwidth limit")]
    RaiseBandwidthLimit,
    /// More connections. The migration has multifd.
    #[error("use more multifd channels if the link is not full")]
    MoreChannels,
    /// Several connections.
    #[error("switch multifd on if the link is not full")]
    Multifd,
    /// A lower dirty limit of the vCPUs. The migration has `dirty-limit`.
    #[error("lower the dirty limit of the vCPUs")]
    LowerDirtyLimit,
    /// Automatic throttling of the vCPUs.
    #[error("switch automatic throttling on")]
    AutoConverge,
    /// A higher limit for the throttle. The migration has `auto-converge`.
    #[error("raise the highest throttle")]
    RaiseThrottle,
    /// Fewer writes by the guest's programs.
    #[error("reduce the guest's writes")]
    FewerWrites,
}

fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

fn of_streams(time: Duration) -> String {
    if time.is_zero() {
        return String::new();
    }
    format!(
        "Devices' state takes {} ms of it, which further rounds do not shorten: raise the downtime limit above that. ",
        time.as_millis()
    )
}

/// The remedies as one sentence.
fn sentence(remedies: &[Remedy]) -> String {
    let texts: Vec<_> = remedies.iter().map(ToString::to_string).collect();
    let text = match texts.split_last() {
        Some((last, before)) if !before.is_empty() => format!("{}, or {last}", before.join(", ")),
        _ => texts.concat(),
    };
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
