//! The clock by which guest time goes on while the guest moves ([`super`], *Time*).

use std::time::{SystemTime, UNIX_EPOCH};

/// Nanoseconds since 1970.
pub(crate) fn realtime_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// How long ago `then` was; 0 if this host's clock is behind.
pub(crate) fn passed_ns(then: u64) -> u64 {
    realtime_ns().saturating_sub(then)
}
