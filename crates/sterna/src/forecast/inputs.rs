//! What a forecast is made from.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::dirty::DirtyModel;
use super::seconds;

/// All that a forecast is made from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inputs {
    /// RAM of the guest, bytes.
    pub ram_bytes: u64,
    /// What the first round has to send, bytes: RAM without the pages that are zero or were never touched, which
    /// cost next to nothing.
    #[serde(rename = "first_pass_bytes")]
    pub first_round_bytes: u64,
    /// Bytes per second while bytes move and the guest runs, over all channels: what the link and `max-bandwidth`
    /// leave.
    pub bandwidth_bytes: u64,
    /// The same during the switchover, which `max-bandwidth` does not limit; none: no more than before.
    #[serde(default, rename = "pause_bandwidth_bytes", skip_serializing_if = "Option::is_none")]
    pub switchover_bandwidth_bytes: Option<u64>,
    /// `avail-switchover-bandwidth`: the bandwidth with which the engine estimates the downtime before it stops the guest;
    /// none: what it measures while the guest runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub avail_switchover_bandwidth_bytes: Option<u64>,
    /// How the guest writes.
    pub dirty: DirtyModel,
    /// How long one sync takes, seconds in JSON.
    #[serde(with = "seconds")]
    pub sync: Duration,
    /// The parameter `downtime-limit`, seconds in JSON.
    #[serde(with = "seconds")]
    pub downtime_limit: Duration,
    /// What each migration costs, whatever the guest writes.
    #[serde(default)]
    pub fixed: Fixed,
    /// What postcopy could do, and whether it can be used.
    #[serde(default, skip_serializing_if = "PostcopyInputs::is_empty")]
    pub postcopy: PostcopyInputs,
    /// By which part bandwidth and dirty rate may be wrong: 0.1 for ten per cent. Above 0.9 counts as 0.9.
    #[serde(default = "default_uncertainty")]
    pub uncertainty: f64,
}

impl Inputs {
    /// The uncertainty, whatever was written there.
    pub(super) fn sane_uncertainty(&self) -> f64 {
        if self.uncertainty.is_finite() { self.uncertainty.clamp(0.0, 0.9) } else { 0.0 }
    }
}

/// What a forecast of postcopy needs besides.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PostcopyInputs {
    /// `max-postcopy-bandwidth`: bytes per second of pages that nobody waits for; none or 0 for no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// How long after the migration's start an operator starts postcopy, seconds in JSON; none: when precopy stands still.
    #[serde(
        serialize_with = "seconds::serialize_optional",
        deserialize_with = "seconds::deserialize_optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub after: Option<Duration>,
    /// After how many rounds postcopy starts; none: not because of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_rounds: Option<u32>,
    /// Why postcopy cannot be used here, as a clause; it is not proposed then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub excluded: Option<String>,
}

impl PostcopyInputs {
    /// Whether nothing is said: it is left out of JSON then, as records had it before there was postcopy.
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The uncertainty to assume if nothing better is known.
pub const UNCERTAINTY: f64 = 0.1;

fn default_uncertainty() -> f64 {
    UNCERTAINTY
}

/// Times that do not depend on what the guest writes; seconds in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Fixed {
    /// Connecting and exchanging headers; the guest runs.
    #[serde(with = "seconds")]
    pub setup: Duration,
    /// vCPUs stop, hooks release.
    #[serde(with = "seconds")]
    pub stop: Duration,
    /// Devices are saved, sent, loaded.
    #[serde(with = "seconds")]
    pub devices: Duration,
    /// The destination starts the guest.
    #[serde(with = "seconds")]
    pub start: Duration,
}

impl Fixed {
    /// The part of it that is downtime.
    pub fn downtime(&self) -> Duration {
        self.stop.saturating_add(self.devices).saturating_add(self.start)
    }
}
