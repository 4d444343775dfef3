//! The fields of a plan.

use serde::{Deserialize, Serialize};
use sterna::forecast::rules::{Comparison, Load};
use sterna::forecast::{Forecast, Inputs};
use sterna_qmp::migration::advice_sentence;

use crate::plan::measured::Measured;

/// Value of the field `schema`.
pub const SCHEMA: &str = "sterna-plan";

/// The version that is written.
pub const VERSION: u32 = 1;

/// A plan for one migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The constant [`SCHEMA`], which identifies the format.
    pub schema: String,
    /// Version of the format; [`VERSION`] when it is written.
    pub version: u32,
    /// The values from which the forecast was computed.
    pub inputs: Inputs,
    /// Explanations of values that were not stated, but assumed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub assumed: Vec<String>,
    /// Values that were measured at a VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
    /// Results of the rules for a constant dirty rate.
    pub rules: Comparison,
    /// The expected rounds; none if the size of RAM is not known.
    pub forecast: Option<Forecast>,
    /// Advice on what to change, as sentences; empty if the migration should converge.
    pub advice: Vec<String>,
}

impl Plan {
    /// Computes a plan. `inputs` without RAM give only the rules.
    pub fn new(inputs: Inputs, assumed: Vec<String>, measured: Option<Measured>) -> Self {
        // The rules use a dirty rate that the size of RAM does not bound.
        let endless = Inputs { ram_bytes: u64::MAX, ..inputs.clone() };
        let rules = Comparison::new(&Load::of(if inputs.ram_bytes == 0 { &endless } else { &inputs }));
        let forecast = (inputs.ram_bytes > 0).then(|| Forecast::new(&inputs));
        let advice = forecast.iter().flat_map(|forecast| &forecast.advice).map(advice_sentence).collect();
        Self { schema: SCHEMA.into(), version: VERSION, inputs, assumed, measured, rules, forecast, advice }
    }

    /// The plan as indented JSON, with a newline at the end.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("plain data is always JSON");
        text.push('\n');
        text
    }

    /// Whether the migration is expected to converge.
    pub fn converges(&self) -> bool {
        self.forecast.as_ref().map_or(self.rules.engine.converges, |forecast| forecast.convergent)
    }
}
