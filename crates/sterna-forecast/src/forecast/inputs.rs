//! The inputs of a forecast.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::dirty::DirtyModel;
use super::seconds;

/// The inputs of a forecast.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inputs {
    /// Size of the guest's RAM, in bytes.
    pub ram_bytes: u64,
    /// Bytes that the first round sends: RAM without zero pages and pages that were never touched, which cost almost
    /// nothing.
    #[serde(rename = "first_pass_bytes")]
    pub first_round_bytes: u64,
    /// Bandwidth over all channels while bytes move and the guest runs, in bytes per second. It is limited by the link
    /// and by `max-bandwidth`.
    pub bandwidth_bytes: u64,
    /// The bandwidth during the switchover, which `max-bandwidth` does not limit. None: no more than while the guest
    /// runs.
    #[serde(default, rename = "pause_bandwidth_bytes", skip_serializing_if = "Option::is_none")]
    pub switchover_bandwidth_bytes: Option<u64>,
    /// `avail-switchover-bandwidth`: the bandwidth with which the engine estimates the downtime before it stops the
    /// guest. None: the bandwidth that it measures while the guest runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub avail_switchover_bandwidth_bytes: Option<u64>,
    /// How the guest writes.
    pub dirty: DirtyModel,
    /// Duration of one sync, in seconds in JSON.
    #[serde(with = "seconds")]
    pub sync: Duration,
    /// The parameter `downtime-limit`, in seconds in JSON.
    #[serde(with = "seconds")]
    pub downtime_limit: Duration,
    /// Costs of each migration that do not depend on the guest's writes.
    #[serde(default)]
    pub fixed: Fixed,
    /// The inputs for postcopy.
    #[serde(default, skip_serializing_if = "PostcopyInputs::is_empty")]
    pub postcopy: PostcopyInputs,
    /// Relative error of bandwidth and dirty rate: 0.1 means ten percent. Values above 0.9 count as 0.9.
    #[serde(default = "default_uncertainty")]
    pub uncertainty: f64,
}

impl Inputs {
    /// The uncertainty, limited to 0 to 0.9.
    pub(super) fn sane_uncertainty(&self) -> f64 {
        if self.uncertainty.is_finite() { self.uncertainty.clamp(0.0, 0.9) } else { 0.0 }
    }
}

/// Additional inputs of a forecast for postcopy.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PostcopyInputs {
    /// `max-postcopy-bandwidth`: limit of background pages, in bytes per second. None or 0: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Time after the migration's start at which postcopy starts, in seconds in JSON. None: when precopy does not
    /// converge.
    #[serde(
        serialize_with = "seconds::serialize_optional",
        deserialize_with = "seconds::deserialize_optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub after: Option<Duration>,
    /// Number of rounds after which postcopy starts. None: the number of rounds does not matter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_rounds: Option<u32>,
    /// The reason why postcopy cannot be used here, as a clause. Postcopy is not proposed then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub excluded: Option<String>,
}

impl PostcopyInputs {
    /// Whether all fields have their defaults. They are then omitted in JSON, as in records from before there was
    /// postcopy.
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The uncertainty that is assumed if no better value is known.
pub const UNCERTAINTY: f64 = 0.1;

fn default_uncertainty() -> f64 {
    UNCERTAINTY
}

/// Durations that do not depend on the guest's writes, in seconds in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Fixed {
    /// Connecting and exchanging headers. The guest runs.
    #[serde(with = "seconds")]
    pub setup: Duration,
    /// Stopping the vCPUs and releasing the hooks.
    #[serde(with = "seconds")]
    pub stop: Duration,
    /// Saving, sending and loading the devices.
    #[serde(with = "seconds")]
    pub devices: Duration,
    /// Starting the guest at the destination.
    #[serde(with = "seconds")]
    pub start: Duration,
}

impl Fixed {
    /// The part of these costs that is downtime.
    pub fn downtime(&self) -> Duration {
        self.stop.saturating_add(self.devices).saturating_add(self.start)
    }
}
