//! A plan: what a forecast was made from, what the rules say, and how the migration will go.
//!
//! - [`live`]: asks a VM for the figures, its own or QEMU's.
//! - [`table`]: the plan for a terminal.
//! - [`picture`]: the plan as a picture.
//!
//! The plan is one JSON object like a migration's record ([`crate::record`]): `schema` and `version` say what it
//! is, times are seconds, rates bytes per second.

pub mod live;
mod picture;
mod table;

use serde::{Deserialize, Serialize};
use sterna::forecast::rules::{Comparison, Load};
use sterna::forecast::{Forecast, Inputs};
use sterna_qmp::migration::advice_sentence;

pub use live::Measured;
pub use picture::picture;
pub use table::table;

/// What `schema` says.
pub const SCHEMA: &str = "sterna-plan";
/// The version that is written.
pub const VERSION: u32 = 1;

/// A plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// [`SCHEMA`].
    pub schema: String,
    /// [`VERSION`].
    pub version: u32,
    /// The figures.
    pub inputs: Inputs,
    /// Where figures come from that nobody stated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub assumed: Vec<String>,
    /// What was measured at a VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
    /// The rules for a constant dirty rate, side by side.
    pub rules: Comparison,
    /// Pass by pass; none if the size of RAM is not known.
    pub forecast: Option<Forecast>,
    /// What to change, in sentences; empty if nothing has to change.
    pub advice: Vec<String>,
}

impl Plan {
    /// Computes it. `inputs` without RAM are for the rules alone.
    pub fn new(inputs: Inputs, assumed: Vec<String>, measured: Option<Measured>) -> Self {
        // Rules reckon with a rate, which no RAM's size bounds.
        let endless = Inputs { ram_bytes: u64::MAX, ..inputs.clone() };
        let rules = Comparison::new(&Load::of(if inputs.ram_bytes == 0 { &endless } else { &inputs }));
        let forecast = (inputs.ram_bytes > 0).then(|| Forecast::new(&inputs));
        let advice = forecast.iter().flat_map(|forecast| &forecast.advice).map(advice_sentence).collect();
        Self { schema: SCHEMA.into(), version: VERSION, inputs, assumed, measured, rules, forecast, advice }
    }

    /// As JSON, indented.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("plain data is always JSON");
        text.push('\n');
        text
    }

    /// Whether the migration is expected to end.
    pub fn converges(&self) -> bool {
        self.forecast.as_ref().map_or(self.rules.engine.converges, |forecast| forecast.convergent)
    }
}

#[cfg(test)]
mod tests;
