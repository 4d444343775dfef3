//! How a guest is announced to the network, as parameters and `announce-self` say it.

use std::time::Duration;

use serde_json::{Map, Value};

use super::parameters::{ParameterSet, parameter};
use crate::error::QmpError;

/// How often, and how fast, a guest is announced to the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announcing {
    /// From the first time to the second.
    pub initial: Duration,
    /// The longest pause between two.
    pub max: Duration,
    /// How often.
    pub rounds: u32,
    /// By how much each pause is longer than the one before.
    pub step: Duration,
}

impl Announcing {
    /// Of four numbers that are checked.
    fn of(number: impl Fn(&str) -> u64) -> Self {
        let milliseconds = |name| Duration::from_millis(number(name));
        Self {
            initial: milliseconds("initial"),
            max: milliseconds("max"),
            rounds: u32::try_from(number("rounds")).unwrap_or(u32::MAX),
            step: milliseconds("step"),
        }
    }

    /// As the migration's parameters say it.
    pub(super) fn of_parameters(parameters: &ParameterSet) -> Self {
        let number = |name: &str| parameters.get(&format!("announce-{name}")).and_then(Value::as_u64);
        Self::of(|name| number(name).unwrap_or(0))
    }

    /// As `announce-self` says it, in the ranges of the parameters.
    pub(super) fn of_arguments(arguments: &Map<String, Value>) -> Result<Self, QmpError> {
        for name in ["initial", "max", "rounds", "step"] {
            let spec = parameter(&format!("announce-{name}"));
            let checked = spec.map(|spec| spec.check(arguments.get(name).unwrap_or(&Value::Null)));
            checked.transpose().map_err(|error| QmpError {
                desc: error.desc.replace(&format!("announce-{name}"), name),
                ..error
            })?;
        }
        Ok(Self::of(|name| arguments.get(name).and_then(Value::as_u64).unwrap_or(0)))
    }
}
