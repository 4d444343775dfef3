//! What a parameter's row says, and the check of a value against it.

use serde_json::Value;

use super::typed::{Field, Typed};
use crate::error::QmpError;
use crate::migration::numbers::{parse_number, parse_size, parse_switch};

/// Longer than any id or host name.
const TEXT_BYTES: usize = 255;

/// What values a parameter takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Range {
    /// An integer between two bounds, both included.
    Integer {
        /// The least.
        least: u64,
        /// The greatest.
        greatest: u64,
    },
    /// A power of two between two bounds, bytes.
    PowerOfTwo {
        /// The least.
        least: u64,
        /// The greatest.
        greatest: u64,
    },
    /// 0 for no limit, or bytes, this many at least.
    Limit {
        /// The least limit.
        least: u64,
    },
    /// True or false.
    Boolean,
    /// One of some words.
    Word(&'static [&'static str]),
    /// A line of text; null is the empty one.
    Text,
}

/// How a bare number of the human monitor is meant, and what is shown behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// A plain number.
    None,
    /// Bytes; size suffixes are taken.
    Bytes,
    /// Bytes per second; a bare number of the human monitor counts MiB.
    BytesPerSecond,
    /// Bytes per second; a bare number of the human monitor counts bytes.
    BytesPerSecondBare,
    /// Milliseconds.
    Milliseconds,
    /// MB per second.
    Megabytes,
    /// Percent.
    Percent,
}

/// When a parameter may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// At any time; a running migration follows.
    Live,
    /// At any time, since it steers nothing that runs.
    Harmless,
    /// Not while a migration runs or is waited for.
    Frozen,
}

/// A parameter: one row of the table.
#[derive(Debug, Clone, Copy)]
pub struct ParameterSpec {
    /// QEMU's name.
    pub name: &'static str,
    /// What it takes.
    pub range: Range,
    /// Its unit.
    pub unit: Unit,
    /// When it may change.
    pub change: Change,
    /// What it does, in a sentence or two.
    pub about: &'static str,
    /// The version of Sterna that had it first.
    pub since: &'static str,
    /// The kind of address to which alone it applies, as `rdma:`; `None` if it applies to all.
    pub only_for: Option<&'static str>,
    pub(super) field: Field,
}

impl ParameterSpec {
    /// QEMU's default.
    pub fn default_value(&self) -> Value {
        (self.field.read)(&Typed::default())
    }

    /// Whether the parameter changes the engine's [`Parameters`](sterna::Parameters). The others steer a monitor or
    /// a protection.
    pub fn is_of_engine(&self) -> bool {
        self.field.part == "engine"
    }

    /// The value that `text` writes, unchecked: [`ParameterSpec::check`] checks its range.
    ///
    /// Sizes and bandwidths may have a suffix (`64M`, `1.5G`), switches are `on` and `off`. A bandwidth without a
    /// suffix counts `rate_unit_bytes` bytes per second: 1 as in QMP, `1 << 20` as in the human monitor. Only
    /// `max-bandwidth` and `avail-switchover-bandwidth` depend on it; `max-postcopy-bandwidth` always counts bytes.
    ///
    /// # Errors
    /// The text is no number, no size or no switch.
    pub fn parse(&self, text: &str, rate_unit_bytes: u64) -> Result<Value, QmpError> {
        match (self.range, self.unit) {
            (Range::Integer { .. } | Range::PowerOfTwo { .. } | Range::Limit { .. }, unit) => {
                let number = match unit {
                    Unit::BytesPerSecond => parse_size(text, rate_unit_bytes),
                    Unit::Bytes | Unit::BytesPerSecondBare => parse_size(text, 1),
                    Unit::None | Unit::Milliseconds | Unit::Megabytes | Unit::Percent => parse_number(text),
                };
                let sizes = matches!(unit, Unit::Bytes | Unit::BytesPerSecond | Unit::BytesPerSecondBare);
                number.map(Value::from).ok_or_else(|| {
                    let what = if sizes { "a size, such as 64M or 1.5G" } else { "an integer" };
                    QmpError::expects(self.name, format!("{what}, not '{text}'"))
                })
            }
            (Range::Boolean, _) => parse_switch(text)
                .map(Value::from)
                .ok_or_else(|| QmpError::expects(self.name, format!("'on' or 'off', not '{text}'"))),
            // In the human monitor, a quoted empty string means "none".
            (Range::Text, _) if text == "\"\"" || text == "''" => Ok("".into()),
            (Range::Word(_) | Range::Text, _) => Ok(text.into()),
        }
    }

    /// `value` if the parameter takes it, normalised.
    pub fn check(&self, value: &Value) -> Result<Value, QmpError> {
        match self.range {
            Range::Integer { least, greatest } => {
                let number = self.integer(value)?;
                let unit = self.unit.suffix();
                number.filter(|number| (least..=greatest).contains(number)).map(Value::from).ok_or_else(
                    || {
                        let range = format!("an integer in the range of {least} to {greatest}{unit}");
                        QmpError::expects(self.name, range)
                    },
                )
            }
            Range::PowerOfTwo { least, greatest } => {
                let number = self.integer(value)?;
                let fits = |number: &u64| number.is_power_of_two() && (least..=greatest).contains(number);
                number.filter(fits).map(Value::from).ok_or_else(|| {
                    QmpError::expects(self.name, format!("a power of two from {least} to {greatest} bytes"))
                })
            }
            Range::Limit { least } => {
                let number = self.integer(value)?;
                let fits = |number: &u64| *number == 0 || *number >= least;
                number.filter(fits).map(Value::from).ok_or_else(|| {
                    QmpError::expects(self.name, format!("0 for no limit, or at least {least} bytes"))
                })
            }
            Range::Boolean => {
                value.as_bool().map(Value::from).ok_or_else(|| QmpError::wrong_type(self.name, "boolean"))
            }
            Range::Word(words) => self.one_of(value, words).map(Value::from),
            Range::Text => self.text(value),
        }
    }

    /// None for a negative or too large number: QEMU's range error rather than its type error.
    fn integer(&self, value: &Value) -> Result<Option<u64>, QmpError> {
        if value.is_i64() || value.is_u64() {
            return Ok(value.as_u64());
        }
        Err(QmpError::wrong_type(self.name, "integer"))
    }

    fn one_of<'a>(&self, value: &'a Value, words: &[&str]) -> Result<&'a str, QmpError> {
        let word = value.as_str().ok_or_else(|| QmpError::wrong_type(self.name, "string"))?;
        if words.contains(&word) {
            return Ok(word);
        }
        Err(QmpError::generic(format!(
            "Parameter '{}' does not accept value '{word}'; use {}",
            self.name,
            words.join(", ")
        )))
    }

    fn text(&self, value: &Value) -> Result<Value, QmpError> {
        if value.is_null() {
            return Ok("".into());
        }
        let text = value.as_str().ok_or_else(|| QmpError::wrong_type(self.name, "string or null"))?;
        if text.len() > TEXT_BYTES || text.contains(char::is_control) {
            return Err(QmpError::expects(self.name, "at most 255 bytes without control characters"));
        }
        Ok(value.clone())
    }
}

impl Unit {
    /// What stands behind a number in texts.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::None | Self::Percent => "",
            Self::Bytes => " bytes",
            Self::BytesPerSecond | Self::BytesPerSecondBare => " bytes/second",
            Self::Milliseconds => " ms",
            Self::Megabytes => " MB/s",
        }
    }
}
