//! The fields of a record.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::record::{check_version, json_of, value_of};

/// Value of the field `schema`.
pub const SCHEMA: &str = "sterna-protection-record";

/// The newest version of the record, and the one that is written.
pub const VERSION: u32 = 1;

/// One protection, from the point of view of one side.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProtectionRecord {
    /// The constant [`SCHEMA`], which identifies the format.
    pub schema: String,
    /// Version of the format; [`VERSION`] when it is written.
    pub version: u32,
    /// Units of the values, by the ending of their names.
    pub units: BTreeMap<String, String>,
    /// The side that recorded the protection; none: the primary.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recorded_by: Option<GuestAt>,
    /// The primary's control socket; empty if the standby recorded the protection.
    pub primary: String,
    /// Address at which the standby listens.
    pub standby: String,
    /// The configured time between two checkpoints; 0 if the standby recorded the protection, which does not know it.
    pub checkpoint_delay_seconds: f64,
    /// The last state of the primary: `seeding`, `protected`, `alone`, `handed over`, `lost`, `failed` and
    /// others. Of the standby: `seeding`, `protected`, `taken over`, `discarded` and others.
    pub state: String,
    /// Where the guest runs as far as this side knows; none while this is undecided.
    pub guest_at: Option<GuestAt>,
    /// How the protection ended, as a sentence; none if it continues without the command, or is undecided.
    pub end: Option<String>,
    /// From the start of the seeding to the end of the record.
    pub total_seconds: f64,
    /// From the start of the seeding until the standby held the first checkpoint; none if it never did.
    pub seeding_seconds: Option<f64>,
    /// The number of the last checkpoint that the standby held.
    pub checkpoints: u64,
    /// The median of about the last thousand pauses of the guest; none before the first.
    pub pause_p50_seconds: Option<f64>,
    /// The 99th percentile of these pauses.
    pub pause_p99_seconds: Option<f64>,
    /// The longest pause that was observed.
    pub pause_longest_seconds: Option<f64>,
    /// How long output waited for its checkpoint: the median.
    pub output_delay_p50_seconds: Option<f64>,
    /// How long output waited for its checkpoint: the 99th percentile.
    pub output_delay_p99_seconds: Option<f64>,
    /// Pieces of output (packets) that were released.
    pub output_released: u64,
    /// Packets that were dropped because too many waited.
    pub output_dropped: u64,
    /// Bytes that were sent to the standby.
    pub transferred_bytes: u64,
    /// The course, in parts of equal length. The length doubles when there are too many parts.
    pub parts: Vec<Part>,
    /// Changes of the state, oldest first. If there are very many, those in the middle are left out.
    pub changes: Vec<Change>,
}

/// A side of the protection: the one that has the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestAt {
    /// The guest runs at the primary.
    Primary,
    /// The standby has the guest.
    Standby,
}

/// A part of the course.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Part {
    /// Start of the part, since the start of the seeding.
    pub at_seconds: f64,
    /// Length of the part.
    pub took_seconds: f64,
    /// Checkpoints that became held in this part.
    pub checkpoints: u64,
    /// The longest pause that was observed; none without a pause.
    pub pause_seconds: Option<f64>,
    /// The greatest age of the held checkpoint; none before the first.
    pub age_seconds: Option<f64>,
    /// The longest observed wait of released output; none if none was released.
    pub output_delay_seconds: Option<f64>,
    /// The most output that was observed to wait.
    pub waiting_bytes: u64,
    /// Packets of output that were dropped.
    pub dropped: u64,
    /// Bytes that were sent to the standby.
    pub sent_bytes: u64,
}

/// A change of the primary's state.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Change {
    /// Time of the change, since the start of the seeding.
    pub at_seconds: f64,
    /// The state after the change.
    pub state: String,
    /// The last checkpoint that was held at this time.
    pub checkpoint: u64,
    /// The reason, if it is known.
    pub why: Option<String>,
}

impl ProtectionRecord {
    /// An empty record with its units.
    pub fn new(primary: &str, standby: &str, checkpoint_delay_seconds: f64) -> Self {
        let units = [("*_seconds", "seconds"), ("*_bytes", "bytes")];
        Self {
            schema: SCHEMA.into(),
            version: VERSION,
            units: units.into_iter().map(|(name, unit)| (name.into(), unit.into())).collect(),
            primary: primary.into(),
            standby: standby.into(),
            checkpoint_delay_seconds,
            ..Self::default()
        }
    }

    /// The record as indented JSON, with a newline at the end.
    pub fn to_json(&self) -> String {
        json_of(self)
    }

    /// Parses a record. The error describes the problem as part of a sentence.
    pub fn from_json(text: &str) -> Result<Self, String> {
        let value = value_of(text)?;
        if value["schema"] != SCHEMA {
            return Err(format!("is not a record of a protection (its `schema` is not \"{SCHEMA}\")"));
        }
        check_version(&value, VERSION)?;
        serde_json::from_value(value).map_err(|error| format!("is damaged ({error})"))
    }
}
