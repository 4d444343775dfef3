//! The fields of a record.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::record::{check_version, json_of, value_of};

/// Value of the field `schema`.
pub const SCHEMA: &str = "sterna-relay-record";

/// The newest version of the record, and the one that is written.
pub const VERSION: u32 = 1;

/// One session, as one of its relays saw it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RelayRecord {
    /// The constant [`SCHEMA`], which identifies the format.
    pub schema: String,
    /// Version of the format; [`VERSION`] when it is written.
    pub version: u32,
    /// Units of the values, by the ending of their names.
    pub units: BTreeMap<String, String>,
    /// The session, 16 hexadecimal digits.
    pub session: String,
    /// The route at the destination's relay.
    pub route: String,
    /// `source` or `destination`: the side of this relay.
    pub role: String,
    /// The address of the other relay, if it was reached.
    pub peer: Option<String>,
    /// How the session ended, as a sentence.
    pub end: String,
    /// Whether all connections ended in order.
    pub in_order: bool,
    /// The last phase, as in `query-relay`.
    pub phase: String,
    /// RAM rounds that the main channel showed.
    pub rounds: u32,
    /// From the first connection to the end.
    pub total_seconds: f64,
    /// From the guest's stop to the destination's answer, as the stream showed both.
    pub downtime_seconds: Option<f64>,
    /// The guest's RAM, if the stream states it.
    pub ram_bytes: Option<u64>,
    /// All connections from the source's VMM.
    pub processed_bytes: u64,
    /// All connections to the source's VMM.
    pub answered_bytes: u64,
    /// Bytes of connections that this relay sent to the other one, repetitions included.
    pub sent_bytes: u64,
    /// Bytes that their frames had for them.
    pub sent_payload_bytes: u64,
    /// Bytes that this relay sent again.
    pub resent_bytes: u64,
    /// Connections between the relays that were lost.
    pub lost_carriers: u64,
    /// Connections that replaced lost ones.
    pub reconnections: u64,
    /// The course, in parts of equal length. The length doubles when there are too many parts.
    pub parts: Vec<Part>,
    /// Phases, losses and reconnections, oldest first. If there are very many, those in the middle are left out.
    pub changes: Vec<Change>,
}

/// A part of the course.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Part {
    /// Start of the part, since the start of the session.
    pub at_seconds: f64,
    /// Length of the part, in seconds.
    pub took_seconds: f64,
    /// Bytes from the source's VMM that passed in it.
    pub processed_bytes: u64,
    /// RAM that still had to pass at its end.
    pub remaining_bytes: Option<u64>,
    /// The dirty rate at its end, in bytes per second.
    pub dirty_rate_bytes: Option<u64>,
    /// Whether the relays had no connection.
    pub is_lost: bool,
}

/// A change that an operator sees.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Change {
    /// Time since the start of the session.
    pub at_seconds: f64,
    /// The change, as a sentence.
    pub what: String,
}

impl RelayRecord {
    /// The record as indented JSON, with a newline at the end.
    pub fn to_json(&self) -> String {
        json_of(self)
    }

    /// Parses a record. The error describes the problem as part of a sentence.
    ///
    /// # Errors
    /// Other text, another schema, a newer version.
    pub fn from_json(text: &str) -> Result<Self, String> {
        let value = value_of(text)?;
        if value["schema"] != SCHEMA {
            return Err(format!("is not a record of a relay (its `schema` is not \"{SCHEMA}\")"));
        }
        check_version(&value, VERSION)?;
        serde_json::from_value(value).map_err(|error| format!("is damaged ({error})"))
    }

    /// Bytes of connections for each byte that was sent for them: 1.0 without compression.
    pub fn compression_ratio(&self) -> f64 {
        match self.sent_payload_bytes {
            0 => 1.0,
            payload => self.sent_bytes as f64 / payload as f64,
        }
    }
}

pub(super) fn units() -> BTreeMap<String, String> {
    let units = [("*_seconds", "seconds"), ("*_bytes", "bytes"), ("dirty_rate_bytes", "bytes per second")];
    units.into_iter().map(|(name, unit)| (name.to_owned(), unit.to_owned())).collect()
}
