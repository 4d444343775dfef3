//! Migration parameters under QEMU's names: what each takes, in which unit, and from when on it is frozen.
//!
//! One table says it all (specs/stream.md §4, §8). Setting is all or nothing: a refused set changes nothing.
//! Those that steer nothing here (the period of dirty limits) are checked and kept, so that programs find what they set.

use std::time::Duration;

use serde_json::{Map, Value};
use sterna::{
    ChunkSize, Compression, Direct, MigrationMode, NonConvergence, Parameters, RdmaParameters,
    StatusQuestions, WaitLimits, ZeroPageDetection,
};

use crate::error::QmpError;
use crate::server::{ArgumentKind, ArgumentSpec};

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

/// One row of the table.
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
    /// The kind of address to which alone it applies, as `rdma:`; `None` if it applies to all.
    pub only_for: Option<&'static str>,
    default: Default,
}

#[derive(Debug, Clone, Copy)]
enum Default {
    Number(u64),
    Boolean(bool),
    Word(&'static str),
}

use Change::{Frozen, Harmless, Live};
use Unit::{Bytes, BytesPerSecond, BytesPerSecondBare, Megabytes, Milliseconds};

/// Longer than any id or host name.
const TEXT_BYTES: usize = 255;
const PERCENT: Range = number(1, 99);

const fn number(least: u64, greatest: u64) -> Range {
    Range::Integer { least, greatest }
}

const fn row(name: &'static str, range: Range, unit: Unit, change: Change, default: u64) -> ParameterSpec {
    ParameterSpec { name, range, unit, change, only_for: None, default: Default::Number(default) }
}

/// One that applies to RDMA alone, in bytes.
const fn rdma_row(name: &'static str, range: Range, default: u64) -> ParameterSpec {
    ParameterSpec { only_for: Some("rdma:"), ..row(name, range, Bytes, Frozen, default) }
}

const fn word(
    name: &'static str,
    words: &'static [&'static str],
    change: Change,
    default: &'static str,
) -> ParameterSpec {
    ParameterSpec {
        name,
        range: Range::Word(words),
        unit: Unit::None,
        change,
        only_for: None,
        default: Default::Word(default),
    }
}

const fn flag(name: &'static str, range: Range) -> ParameterSpec {
    ParameterSpec {
        name,
        range,
        unit: Unit::None,
        change: Harmless,
        only_for: None,
        default: Default::Boolean(false),
    }
}

const fn frozen_flag(name: &'static str) -> ParameterSpec {
    ParameterSpec { change: Frozen, ..flag(name, Range::Boolean) }
}

const fn text(name: &'static str) -> ParameterSpec {
    ParameterSpec {
        name,
        range: Range::Text,
        unit: Unit::None,
        change: Frozen,
        only_for: None,
        default: Default::Word(""),
    }
}

/// What becomes of a migration that does not converge.
const NON_CONVERGENCE: &str = "x-sterna-non-convergence";
/// Whether a lost acknowledgement is asked for, and such questions answered.
const STATUS_QUESTION: &str = "x-sterna-status-question";
/// The longest WRITE and the least piece of memory that is registered.
const CHUNK_SIZE: &str = "x-rdma-chunk-size";
/// Most bytes of guest memory that are registered at once.
const PINNED_LIMIT: &str = "x-sterna-rdma-pinned-limit";
/// How long a lost connection may take to be made anew; 0: it ends the migration (specs/extension.md §13).
const POSTCOPY_AFTER: &str = "x-sterna-postcopy-after";
const POSTCOPY_AFTER_ROUNDS: &str = "x-sterna-postcopy-after-rounds";
const RECONNECT_WINDOW: &str = "x-sterna-reconnect-window";
/// What decides when a checkpoint is taken.
pub(super) const CHECKPOINT_MODE: &str = "x-sterna-checkpoint-mode";
/// How long output waits until a checkpoint is taken for it.
pub(super) const OUTPUT_DELAY: &str = "x-sterna-output-delay";
/// Percent of its time that a guest may stand for checkpoints.
pub(super) const CHECKPOINT_OVERHEAD: &str = "x-sterna-checkpoint-overhead";
/// How many checkpoints may be taken and not be held yet.
pub(super) const IN_FLIGHT: &str = "x-sterna-checkpoints-in-flight";
/// Whether pages of checkpoints are copied while the guest stands, or when it goes on.
pub(super) const CHECKPOINT_COPY: &str = "x-sterna-checkpoint-copy";
/// The most bytes of checkpoints' pages that are copied while the guest stands.
pub(super) const BUFFER_SIZE: &str = "x-sterna-checkpoint-buffer-size";
/// The most bytes that a checkpoint may bring to a standby.
pub(super) const JOURNAL_SIZE: &str = "x-sterna-checkpoint-journal-size";
const HOUR_MS: u64 = 3_600_000;

/// Every parameter, in the order in which they are shown. Those named `x-sterna-` QEMU does not know.
pub const PARAMETERS: &[ParameterSpec] = &[
    row("announce-initial", number(0, 100_000), Milliseconds, Harmless, 50),
    row("announce-max", number(0, 100_000), Milliseconds, Harmless, 550),
    row("announce-rounds", number(0, 1000), Unit::None, Harmless, 5),
    row("announce-step", number(1, 10_000), Milliseconds, Harmless, 100),
    row("throttle-trigger-threshold", number(1, 100), Unit::None, Live, 50),
    row("cpu-throttle-initial", PERCENT, Unit::None, Live, 20),
    row("cpu-throttle-increment", PERCENT, Unit::None, Live, 10),
    ParameterSpec { change: Live, ..flag("cpu-throttle-tailslow", Range::Boolean) },
    row("max-cpu-throttle", PERCENT, Unit::None, Live, 99),
    text("tls-creds"),
    text("tls-hostname"),
    text("tls-authz"),
    row("max-bandwidth", number(0, u64::MAX), BytesPerSecond, Live, 128 << 20),
    row("avail-switchover-bandwidth", number(0, u64::MAX), BytesPerSecond, Live, 0),
    row("downtime-limit", number(0, 2_000_000), Milliseconds, Live, 300),
    row("x-checkpoint-delay", number(1, u32::MAX as u64), Milliseconds, Live, 20_000),
    row("multifd-channels", number(1, 255), Unit::None, Frozen, 2),
    word("multifd-compression", &["none", "zlib", "zstd"], Frozen, "none"),
    row("multifd-zlib-level", number(0, 9), Unit::None, Frozen, 1),
    row("multifd-qatzip-level", number(1, 9), Unit::None, Harmless, 1),
    row("multifd-zstd-level", number(0, 20), Unit::None, Frozen, 1),
    row("xbzrle-cache-size", Range::PowerOfTwo { least: 4096, greatest: 1 << 63 }, Bytes, Frozen, 64 << 20),
    row("max-postcopy-bandwidth", number(0, u64::MAX), BytesPerSecondBare, Live, 0),
    row("x-vcpu-dirty-limit-period", number(1, 1000), Milliseconds, Harmless, 1000),
    row("vcpu-dirty-limit", number(1, u64::MAX), Megabytes, Live, 1),
    word("mode", &["normal", "cpr-transfer"], Frozen, "normal"),
    word("zero-page-detection", &["none", "legacy", "multifd"], Frozen, "multifd"),
    frozen_flag("direct-io"),
    rdma_row(CHUNK_SIZE, Range::PowerOfTwo { least: 1 << 20, greatest: 1 << 30 }, 1 << 20),
    ParameterSpec {
        name: NON_CONVERGENCE,
        range: Range::Word(&["keep-going", "fail", "switchover", "postcopy"]),
        unit: Unit::None,
        change: Live,
        only_for: None,
        default: Default::Word("keep-going"),
    },
    row(POSTCOPY_AFTER, number(0, 24 * HOUR_MS), Milliseconds, Live, 0),
    row(POSTCOPY_AFTER_ROUNDS, number(0, u32::MAX as u64), Unit::None, Live, 0),
    frozen_flag("x-sterna-replace-file"),
    frozen_flag("x-sterna-cpr-allow-root"),
    word(STATUS_QUESTION, &["auto", "operator"], Frozen, "auto"),
    row("x-sterna-device-queue-size", number(1 << 16, 1 << 40), Bytes, Frozen, 64 << 20),
    row(BUFFER_SIZE, number(4096, 1 << 40), Bytes, Frozen, 256 << 20),
    word(CHECKPOINT_MODE, &["interval", "output", "load"], Live, "interval"),
    row(OUTPUT_DELAY, number(1, HOUR_MS), Milliseconds, Live, 10),
    row(CHECKPOINT_OVERHEAD, number(1, 90), Unit::None, Live, 10),
    row(IN_FLIGHT, number(1, sterna::replica::MOST_IN_FLIGHT as u64), Unit::None, Live, 1),
    word(CHECKPOINT_COPY, &["auto", "copy", "copy-on-write"], Live, "auto"),
    row(JOURNAL_SIZE, number(4096, 1 << 40), Bytes, Frozen, 1 << 30),
    rdma_row(PINNED_LIMIT, Range::Limit { least: 1 << 20 }, 0),
    row(RECONNECT_WINDOW, number(0, HOUR_MS), Milliseconds, Frozen, 0),
    row("x-sterna-setup-limit", number(100, HOUR_MS), Milliseconds, Frozen, 30_000),
    row("x-sterna-stall-limit", number(100, HOUR_MS), Milliseconds, Frozen, 30_000),
    row("x-sterna-prepare-limit", number(100, HOUR_MS), Milliseconds, Frozen, 60_000),
    row("x-sterna-acknowledge-limit", number(100, HOUR_MS), Milliseconds, Frozen, 30_000),
];

/// What an operator has set.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSet(Vec<Value>);

impl std::default::Default for ParameterSet {
    fn default() -> Self {
        Self(PARAMETERS.iter().map(ParameterSpec::default_value).collect())
    }
}

impl ParameterSet {
    /// Sets what `changes` names and leaves the rest. `busy` freezes what a migration has read already.
    ///
    /// # Errors
    /// An unknown name, a value of another type or outside its range, a change of something frozen. Then
    /// nothing has changed.
    pub fn set(&mut self, changes: &Map<String, Value>, busy: bool) -> Result<(), QmpError> {
        let mut next = self.clone();
        for (name, value) in changes {
            let at = index_of(name).ok_or_else(|| QmpError::unexpected(name))?;
            let spec = &PARAMETERS[at];
            let value = spec.check(value)?;
            if busy && spec.change == Frozen && next.0[at] != value {
                return Err(QmpError::generic(format!(
                    "Parameter '{name}' cannot change during a migration or while one is expected; \
                     end it with 'migrate_cancel' first"
                )));
            }
            next.0[at] = value;
        }
        if next.number("max-cpu-throttle") < next.number("cpu-throttle-initial") {
            return Err(QmpError::expects(
                "max-cpu-throttle",
                "an integer in the range of cpu-throttle-initial to 99",
            ));
        }
        *self = next;
        Ok(())
    }

    /// All of them: the answer to `query-migrate-parameters`.
    pub fn to_json(&self) -> Value {
        let members = PARAMETERS.iter().zip(&self.0);
        Value::Object(members.map(|(spec, value)| (spec.name.to_owned(), value.clone())).collect())
    }

    /// One by its name.
    pub fn get(&self, name: &str) -> Option<&Value> {
        index_of(name).map(|at| &self.0[at])
    }

    /// In the engine's types.
    pub fn to_engine(&self) -> Parameters {
        let milliseconds = |name| Duration::from_millis(self.number(name));
        // The table's ranges keep these within a byte.
        let byte = |name| u8::try_from(self.number(name)).unwrap_or(u8::MAX);
        Parameters {
            max_bandwidth_bytes: self.number("max-bandwidth"),
            max_postcopy_bandwidth_bytes: self.number("max-postcopy-bandwidth"),
            downtime_limit: milliseconds("downtime-limit"),
            avail_switchover_bandwidth_bytes: self.number("avail-switchover-bandwidth"),
            multifd_channels: byte("multifd-channels"),
            multifd_compression: match self.word("multifd-compression") {
                "zlib" => Compression::Zlib,
                "zstd" => Compression::Zstd,
                _ => Compression::None,
            },
            multifd_zlib_level: byte("multifd-zlib-level"),
            multifd_zstd_level: byte("multifd-zstd-level"),
            zero_page_detection: match self.word("zero-page-detection") {
                "none" => ZeroPageDetection::None,
                "legacy" => ZeroPageDetection::Legacy,
                _ => ZeroPageDetection::Multifd,
            },
            // Names of objects, which the monitor keeps.
            tls: None,
            // Where a file system has none, the page cache is better than no file; a warning says so.
            direct_io: if self.flag("direct-io") { Direct::Wanted } else { Direct::Off },
            replace_file: self.flag("x-sterna-replace-file"),
            cpu_throttle_initial: byte("cpu-throttle-initial"),
            cpu_throttle_increment: byte("cpu-throttle-increment"),
            cpu_throttle_tailslow: self.flag("cpu-throttle-tailslow"),
            max_cpu_throttle: byte("max-cpu-throttle"),
            throttle_trigger_threshold: byte("throttle-trigger-threshold"),
            vcpu_dirty_limit_bytes: self.number("vcpu-dirty-limit").saturating_mul(1 << 20),
            non_convergence: match self.word(NON_CONVERGENCE) {
                "fail" => NonConvergence::Fail,
                "switchover" => NonConvergence::Switchover,
                "postcopy" => NonConvergence::Postcopy,
                _ => NonConvergence::KeepGoing,
            },
            postcopy_after: milliseconds(POSTCOPY_AFTER),
            // The table takes no more.
            postcopy_after_rounds: self.number(POSTCOPY_AFTER_ROUNDS) as u32,
            status_questions: match self.word(STATUS_QUESTION) {
                "operator" => StatusQuestions::Operator,
                _ => StatusQuestions::Auto,
            },
            mode: match self.word("mode") {
                "cpr-transfer" => MigrationMode::CprTransfer,
                _ => MigrationMode::Normal,
            },
            cpr_allow_root: self.flag("x-sterna-cpr-allow-root"),
            reconnect_window: milliseconds(RECONNECT_WINDOW),
            xbzrle_cache_bytes: self.number("xbzrle-cache-size"),
            max_queued_stream_bytes: self.number("x-sterna-device-queue-size"),
            rdma: RdmaParameters {
                // The table takes no other.
                chunk: ChunkSize::new(self.number(CHUNK_SIZE)).unwrap_or_default(),
                pinned_limit_bytes: Some(self.number(PINNED_LIMIT)).filter(|limit| *limit > 0),
                ..RdmaParameters::default()
            },
            limits: WaitLimits {
                setup: milliseconds("x-sterna-setup-limit"),
                stall: milliseconds("x-sterna-stall-limit"),
                switchover: WaitLimits::default().switchover,
                prepare: milliseconds("x-sterna-prepare-limit"),
                acknowledge: milliseconds("x-sterna-acknowledge-limit"),
                ..WaitLimits::default()
            },
        }
    }

    pub(super) fn number(&self, name: &str) -> u64 {
        self.get(name).and_then(Value::as_u64).unwrap_or(0)
    }

    fn flag(&self, name: &str) -> bool {
        self.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    pub(super) fn word(&self, name: &str) -> &str {
        self.get(name).and_then(Value::as_str).unwrap_or("")
    }
}

/// The row of parameter `name`.
pub fn parameter(name: &str) -> Option<&'static ParameterSpec> {
    index_of(name).map(|at| &PARAMETERS[at])
}

/// The arguments of `migrate-set-parameters`.
pub(crate) fn argument_specs() -> Vec<ArgumentSpec> {
    let argument = |spec: &ParameterSpec| {
        let kind = match spec.range {
            Range::Integer { .. } | Range::PowerOfTwo { .. } | Range::Limit { .. } => ArgumentKind::Integer,
            Range::Boolean => ArgumentKind::Boolean,
            Range::Word(_) => ArgumentKind::String,
            Range::Text => ArgumentKind::Any,
        };
        ArgumentSpec { name: spec.name, kind, optional: true }
    };
    PARAMETERS.iter().map(argument).collect()
}

fn index_of(name: &str) -> Option<usize> {
    PARAMETERS.iter().position(|spec| spec.name == name)
}

impl ParameterSpec {
    /// QEMU's default.
    pub fn default_value(&self) -> Value {
        match self.default {
            Default::Number(number) => number.into(),
            Default::Boolean(boolean) => boolean.into(),
            Default::Word(word) => word.into(),
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
            Self::None => "",
            Self::Bytes => " bytes",
            Self::BytesPerSecond | Self::BytesPerSecondBare => " bytes/second",
            Self::Milliseconds => " ms",
            Self::Megabytes => " MB/s",
        }
    }
}
