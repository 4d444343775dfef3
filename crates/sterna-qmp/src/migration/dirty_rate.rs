//! `calc-dirty-rate` and `query-dirty-rate`, as QEMU answers them (specs/stream.md §8.1).
//!
//! Sterna counts every page, so it has no `page-sampling`. A client that requests it, or no mode, gets the dirty log
//! that the VM has, and `mode` in the answer names it. `x-sterna-measured` contains the exact values, which QEMU's
//! members round to whole MB per second.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use sterna::dirty_rate::{DirtyRateMeasurement, DirtyReading, MeasuringState};
use sterna::ram::PAGE_SIZE;

use super::vm::MonitoredVm;
use crate::error::QmpError;
use crate::server::Arguments;

const SHORTEST_MS: u64 = 50;
const LONGEST_MS: u64 = 60_000;
const MEGABYTE: u64 = 1 << 20;
const BITMAP: &str = "dirty-bitmap";
const RING: &str = "dirty-ring";
pub(super) const MODES: [&str; 3] = ["page-sampling", BITMAP, RING];

/// The request of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Order {
    interval: Duration,
    mode: Option<&'static str>,
}

/// A running or finished measurement.
pub(super) struct Measuring {
    measurement: DirtyRateMeasurement,
    started: SystemTime,
    interval: Duration,
    mode: &'static str,
    /// A migration ended the measurement early.
    is_short: AtomicBool,
}

impl Order {
    /// Reads the arguments of `calc-dirty-rate`.
    pub(super) fn parse(arguments: &Map<String, Value>) -> Result<Self, QmpError> {
        let unit_ms = unit_ms(arguments)?;
        let time = arguments.get("calc-time").and_then(Value::as_u64).unwrap_or(0);
        let milliseconds = time.saturating_mul(unit_ms);
        if !(SHORTEST_MS..=LONGEST_MS).contains(&milliseconds) {
            return Err(QmpError::generic(format!(
                "Calculation time is out of range [{SHORTEST_MS}ms, {LONGEST_MS}ms]."
            )));
        }
        let mode = match Arguments(arguments).string("mode")? {
            None => None,
            Some(word) => Some(MODES.into_iter().find(|mode| *mode == word).ok_or_else(|| {
                QmpError::generic(format!("Parameter 'mode' does not accept value '{word}'"))
            })?),
        };
        if let Some(pages) = arguments.get("sample-pages") {
            if mode.is_some_and(|mode| mode != "page-sampling") {
                return Err(QmpError::generic("sample-pages is used only in page-sampling mode"));
            }
            if !pages.as_u64().is_some_and(|pages| (128..=16_384).contains(&pages)) {
                return Err(QmpError::generic("sample-pages is out of range[128, 16384]."));
            }
        }
        Ok(Self { interval: Duration::from_millis(milliseconds), mode })
    }

    /// A request over whole seconds, from the human monitor.
    pub(super) fn of_seconds(seconds: u64, mode: Option<&'static str>) -> Result<Self, QmpError> {
        let arguments = json!({ "calc-time": seconds });
        let order = Self::parse(arguments.as_object().unwrap_or(&Map::new()))?;
        Ok(Self { mode, ..order })
    }

    /// Starts the measurement.
    pub(super) fn start(self, vm: Arc<dyn MonitoredVm>) -> Result<Measuring, QmpError> {
        let own = own_mode(&*vm);
        if let Some(mode) = self.mode.filter(|mode| *mode != own && *mode != "page-sampling") {
            return Err(QmpError::generic(format!(
                "mode {mode} is not enabled, use other method instead: this VM has {own}."
            )));
        }
        let measurement = DirtyRateMeasurement::start(vm, self.interval)
            .map_err(|error| QmpError::generic(error.to_string()))?;
        let started = SystemTime::now();
        let is_short = AtomicBool::new(false);
        Ok(Measuring { measurement, started, interval: self.interval, mode: own, is_short })
    }
}

/// The mode of the VM's dirty log. Only KVM has rings. Another VM may count the dirty pages of vCPUs in its own way.
fn own_mode(vm: &dyn MonitoredVm) -> &'static str {
    if vm.uses_kvm() && super::dirty_limit::limiter(vm.throttle()).is_some() { RING } else { BITMAP }
}

impl Measuring {
    pub(super) fn is_running(&self) -> bool {
        self.measurement.is_running()
    }

    /// Ends the measurement with the pages counted so far. The dirty log is free when this returns.
    pub(super) fn finish(&self) {
        if self.is_running() {
            self.is_short.store(true, Ordering::Relaxed);
            self.measurement.finish();
        }
    }

    fn query(&self, unit_ms: u64) -> Value {
        let since = self.started.duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut answer = info("measuring", unit_ms, self.mode, since, self.interval);
        match self.measurement.state() {
            MeasuringState::Measuring => {}
            MeasuringState::Measured(reading) => self.fill(&mut answer, &reading, unit_ms),
            MeasuringState::Failed(error) => {
                answer["status"] = "unstarted".into();
                answer["x-sterna-error"] = error.to_string().into();
            }
        }
        answer
    }

    fn fill(&self, answer: &mut Value, reading: &DirtyReading, unit_ms: u64) {
        answer["status"] = "measured".into();
        if self.is_short.load(Ordering::Relaxed) {
            answer["calc-time"] = (reading.interval.as_millis() as u64 / unit_ms).into();
        }
        answer["dirty-rate"] = (reading.bytes_per_second() as u64 / MEGABYTE).into();
        if !reading.vcpu_bytes_per_second.is_empty() {
            let rates = reading.vcpu_bytes_per_second.iter().enumerate();
            answer["vcpu-dirty-rate"] =
                rates.map(|(id, rate)| json!({"id": id, "dirty-rate": rate / MEGABYTE})).collect();
        }
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        answer["x-sterna-measured"] = json!({
            "dirty-bytes": reading.dirty_bytes(),
            "interval-us": micros(reading.interval),
            "sync-us": micros(reading.sync),
            "touched-bytes": reading.touched_pages * PAGE_SIZE as u64,
        });
    }
}

/// Answers `query-dirty-rate`.
pub(super) fn query(last: Option<&Measuring>, arguments: &Map<String, Value>) -> Result<Value, QmpError> {
    let unit_ms = unit_ms(arguments)?;
    let nothing = || info("unstarted", unit_ms, BITMAP, Duration::ZERO, Duration::ZERO);
    Ok(last.map_or_else(nothing, |last| last.query(unit_ms)))
}

fn info(status: &str, unit_ms: u64, mode: &str, since: Duration, interval: Duration) -> Value {
    json!({
        "status": status,
        "start-time": since.as_secs(),
        "calc-time": interval.as_millis() as u64 / unit_ms,
        "calc-time-unit": if unit_ms == 1 { "millisecond" } else { "second" },
        "sample-pages": 0,
        "mode": mode,
    })
}

/// The number of milliseconds in the client's unit, `calc-time-unit`.
fn unit_ms(arguments: &Map<String, Value>) -> Result<u64, QmpError> {
    match Arguments(arguments).string("calc-time-unit")? {
        None | Some("second") => Ok(1000),
        Some("millisecond") => Ok(1),
        Some(other) => {
            Err(QmpError::generic(format!("Parameter 'calc-time-unit' does not accept value '{other}'")))
        }
    }
}
