//! What parameters steer, in types, and how the value of a parameter gets there and back.

use std::time::Duration;

use serde_json::Value;
use sterna::{
    ChunkSize, Compression, Direct, MigrationMode, NonConvergence, Parameters, StatusQuestions,
    ZeroPageDetection,
};
use sterna_standby::CheckpointCopy;

use crate::migration::announcing::Announcing;

/// The meaning of a [`ParameterSet`](super::ParameterSet).
#[derive(Debug, Clone, PartialEq)]
pub(in crate::migration) struct Typed {
    /// The engine's; `tls` is missing, because the monitor keeps the objects that it names.
    pub(in crate::migration) engine: Parameters,
    pub(in crate::migration) announcing: Announcing,
    pub(in crate::migration) checkpoints: Checkpoints,
    pub(in crate::migration) tls: TlsNames,
}

/// How a guest is protected.
#[derive(Debug, Clone, PartialEq)]
pub(in crate::migration) struct Checkpoints {
    pub(in crate::migration) delay: Duration,
    pub(in crate::migration) mode: Mode,
    pub(in crate::migration) output_delay: Duration,
    pub(in crate::migration) overhead_percent: u8,
    pub(in crate::migration) in_flight: u8,
    pub(in crate::migration) copy: CheckpointCopy,
    pub(in crate::migration) buffer_bytes: u64,
    pub(in crate::migration) journal_bytes: u64,
}

/// `x-sterna-checkpoint-mode` alone. The engine's mode has the delay or the overhead with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::migration) enum Mode {
    Interval,
    Output,
    Load,
}

/// Ids of objects, and the name that a certificate must have; empty: none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(in crate::migration) struct TlsNames {
    pub(in crate::migration) creds: String,
    pub(in crate::migration) hostname: String,
    pub(in crate::migration) authz: String,
}

/// QEMU's default of `max-bandwidth`, bytes per second. The engine has none.
const MAX_BANDWIDTH: u64 = 128 << 20;

impl Default for Typed {
    fn default() -> Self {
        Self {
            engine: Parameters { max_bandwidth_bytes: MAX_BANDWIDTH, ..Parameters::default() },
            announcing: Announcing::default(),
            checkpoints: Checkpoints::default(),
            tls: TlsNames::default(),
        }
    }
}

impl Default for Checkpoints {
    fn default() -> Self {
        Self {
            delay: Duration::from_secs(20),
            mode: Mode::Interval,
            output_delay: Duration::from_millis(10),
            overhead_percent: 10,
            in_flight: 1,
            copy: CheckpointCopy::Auto,
            buffer_bytes: 256 << 20,
            journal_bytes: 1 << 30,
        }
    }
}

/// Where the value of a parameter is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Field {
    /// The field of [`Typed`] that contains it; empty if none does.
    pub(super) part: &'static str,
    pub(super) read: fn(&Typed) -> Value,
    /// The value has passed the parameter's check.
    pub(super) write: fn(&mut Typed, &Value),
}

/// A field of [`Typed`] by its path, such as `field!(engine.downtime_limit)`.
macro_rules! field {
    ($part:ident $(.$path:ident)+) => {
        $crate::migration::parameters::typed::Field {
            part: stringify!($part),
            read: |typed| $crate::migration::parameters::typed::Setting::value(&typed.$part$(.$path)+),
            write: |typed, value| $crate::migration::parameters::typed::Setting::set(&mut typed.$part$(.$path)+, value),
        }
    };
}
pub(super) use field;

/// A type that a parameter's value can have.
pub(super) trait Setting {
    /// As clients see it.
    fn value(&self) -> Value;
    /// Takes over a checked value. One of another type changes nothing.
    fn set(&mut self, value: &Value);
}

macro_rules! numbers {
    ($($number:ty),+) => {
        $(impl Setting for $number {
            fn value(&self) -> Value {
                (*self).into()
            }

            fn set(&mut self, value: &Value) {
                if let Some(number) = value.as_u64() {
                    *self = Self::try_from(number).unwrap_or(Self::MAX);
                }
            }
        })+
    };
}

numbers!(u8, u32, u64);

impl Setting for bool {
    fn value(&self) -> Value {
        (*self).into()
    }

    fn set(&mut self, value: &Value) {
        *self = value.as_bool().unwrap_or(*self);
    }
}

impl Setting for String {
    fn value(&self) -> Value {
        self.as_str().into()
    }

    fn set(&mut self, value: &Value) {
        if let Some(text) = value.as_str() {
            text.clone_into(self);
        }
    }
}

/// Milliseconds.
impl Setting for Duration {
    fn value(&self) -> Value {
        u64::try_from(self.as_millis()).unwrap_or(u64::MAX).into()
    }

    fn set(&mut self, value: &Value) {
        if let Some(milliseconds) = value.as_u64() {
            *self = Self::from_millis(milliseconds);
        }
    }
}

/// Bytes; 0 for no limit.
impl Setting for Option<u64> {
    fn value(&self) -> Value {
        self.unwrap_or(0).into()
    }

    fn set(&mut self, value: &Value) {
        *self = value.as_u64().filter(|limit| *limit > 0);
    }
}

impl Setting for ChunkSize {
    fn value(&self) -> Value {
        self.bytes().into()
    }

    fn set(&mut self, value: &Value) {
        *self = value.as_u64().and_then(|bytes| Self::new(bytes).ok()).unwrap_or(*self);
    }
}

/// Where a file system has no direct I/O, the page cache is better than no file, and a warning names the reason.
impl Setting for Direct {
    fn value(&self) -> Value {
        (*self != Self::Off).into()
    }

    fn set(&mut self, value: &Value) {
        *self = if value == &Value::Bool(true) { Self::Wanted } else { Self::Off };
    }
}

/// Types whose words serde knows.
macro_rules! words {
    ($($word:ty),+) => {
        $(impl Setting for $word {
            fn value(&self) -> Value {
                serde_json::to_value(self).unwrap_or_default()
            }

            fn set(&mut self, value: &Value) {
                if let Ok(word) = serde_json::from_value(value.clone()) {
                    *self = word;
                }
            }
        })+
    };
}

words!(Compression, ZeroPageDetection, NonConvergence, StatusQuestions, MigrationMode);

impl Setting for Mode {
    fn value(&self) -> Value {
        match self {
            Self::Interval => "interval",
            Self::Output => "output",
            Self::Load => "load",
        }
        .into()
    }

    fn set(&mut self, value: &Value) {
        *self = match value.as_str() {
            Some("output") => Self::Output,
            Some("load") => Self::Load,
            _ => Self::Interval,
        };
    }
}

impl Setting for CheckpointCopy {
    fn value(&self) -> Value {
        match self {
            Self::Copy => "copy",
            Self::CopyOnWrite => "copy-on-write",
            _ => "auto",
        }
        .into()
    }

    fn set(&mut self, value: &Value) {
        *self = match value.as_str() {
            Some("copy") => Self::Copy,
            Some("copy-on-write") => Self::CopyOnWrite,
            _ => Self::Auto,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::super::{PARAMETERS, Range};
    use super::*;

    /// Those of QEMU that steer nothing here.
    const WITHOUT_FIELD: [&str; 2] = ["multifd-qatzip-level", "x-vcpu-dirty-limit-period"];

    fn values(range: Range) -> Vec<Value> {
        match range {
            Range::Integer { least, greatest } => vec![least.into(), greatest.min(u64::MAX >> 20).into()],
            Range::PowerOfTwo { least, greatest } => vec![least.into(), greatest.into()],
            Range::Limit { least } => vec![0.into(), least.into()],
            Range::Boolean => vec![true.into(), false.into()],
            Range::Word(words) => words.iter().map(|word| Value::from(*word)).collect(),
            Range::Text => vec!["text".into(), "".into()],
        }
    }

    #[test]
    fn monitor_keeps_qemus_bandwidth_where_the_library_has_no_limit() {
        let monitor = super::super::ParameterSet::default().to_engine();
        assert_eq!((monitor.max_bandwidth_bytes, Parameters::default().max_bandwidth_bytes), (128 << 20, 0));
    }

    #[test]
    fn every_value_comes_back_from_its_field_and_changes_no_other() {
        for spec in PARAMETERS.iter().filter(|spec| !WITHOUT_FIELD.contains(&spec.name)) {
            for value in values(spec.range) {
                let mut typed = Typed::default();
                (spec.field.write)(&mut typed, &value);
                for other in PARAMETERS {
                    let expected =
                        if other.name == spec.name { value.clone() } else { other.default_value() };
                    assert_eq!((other.field.read)(&typed), expected, "{} after {}", other.name, spec.name);
                }
            }
        }
    }
}
