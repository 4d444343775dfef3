//! What a VM says about itself that a forecast needs: its RAM, its settings, and how its guest writes.
//!
//! The guest's writing is measured by the VM: `calc-dirty-rate` counts the distinct pages that were written in an
//! interval. Several intervals make a curve, since a guest that writes the same pages over and over dirties less
//! per second the longer one looks. The pages themselves are counted where the VM can (`dirty-bitmap`, or
//! `dirty-ring` where it has one); elsewhere QEMU compares samples of pages, which is coarse.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{DriveError, Settings, Vm};
use crate::client::ClientError;

/// Intervals that show the bend of most guests' curves.
pub const INTERVALS: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_millis(300), Duration::from_secs(1)];
/// The interval must lie between these, as QEMU has it.
pub const SHORTEST: Duration = Duration::from_millis(50);
/// The longest interval.
pub const LONGEST: Duration = Duration::from_secs(60);

/// The best way of counting comes first.
const MODES: [&str; 3] = ["dirty-bitmap", "dirty-ring", "page-sampling"];
/// Pages per GiB that QEMU's sampling looks at, at most.
const MOST_SAMPLES: u64 = 16_384;
const STEP: Duration = Duration::from_millis(5);
/// How long a result may take beyond its interval: RAM may be large, and the machine busy.
const GRACE: Duration = Duration::from_secs(30);
/// QEMU's MB.
const MEGABYTE: f64 = (1u64 << 20) as f64;

/// A VM's size and settings.
#[derive(Debug, Clone, PartialEq)]
pub struct Survey {
    /// `query-status`'s word.
    pub run_state: String,
    /// RAM that a migration moves, bytes.
    pub ram_bytes: u64,
    /// `max-bandwidth`, bytes per second; none for no limit.
    pub max_bandwidth_bytes: Option<u64>,
    /// `avail-switchover-bandwidth`, bytes per second; none if it is to be measured.
    pub switchover_bandwidth_bytes: Option<u64>,
    /// `downtime-limit`.
    pub downtime_limit: Duration,
    /// `max-postcopy-bandwidth`, bytes per second; none for no limit.
    pub max_postcopy_bandwidth_bytes: Option<u64>,
    /// Why postcopy does not go with these settings, as a clause.
    pub postcopy_excluded: Option<String>,
}

/// One measurement.
#[derive(Debug, Clone, PartialEq)]
pub struct Reading {
    /// How the pages were counted: QEMU's word.
    pub mode: String,
    /// How long was waited.
    pub interval: Duration,
    /// Bytes of pages that were written meanwhile.
    pub distinct_bytes: u64,
    /// Of each vCPU, bytes per second; empty where the VM does not know.
    pub vcpu_dirty_bytes: Vec<u64>,
    /// How long the look for dirty pages took; only Sterna says.
    pub sync: Option<Duration>,
    /// RAM that was ever touched, bytes; only Sterna says.
    pub touched_bytes: Option<u64>,
}

impl Survey {
    /// Asks `vm`.
    pub fn ask(vm: &mut Vm) -> Result<Self, DriveError> {
        let run_state = vm.run_state()?;
        let settings = Settings::read(vm)?;
        let number = |name: &str| settings.parameter(name).and_then(Value::as_u64);
        let rate = |name: &str| number(name).filter(|rate| *rate > 0);
        Ok(Self {
            run_state,
            ram_bytes: ram_bytes(vm)?,
            max_bandwidth_bytes: rate("max-bandwidth"),
            switchover_bandwidth_bytes: rate("avail-switchover-bandwidth"),
            downtime_limit: Duration::from_millis(number("downtime-limit").unwrap_or(300)),
            max_postcopy_bandwidth_bytes: rate("max-postcopy-bandwidth"),
            postcopy_excluded: postcopy_excluded(&settings, vm.is_sterna()),
        })
    }
}

/// Capabilities that a VM with `postcopy-ram` does not take besides.
const NOT_WITH_POSTCOPY: [&str; 4] = ["mapped-ram", "x-ignore-shared", "background-snapshot", "x-colo"];

fn postcopy_excluded(settings: &Settings, is_sterna: bool) -> Option<String> {
    let is_on = |name: &str| settings.capability(name) == Some(true);
    if settings.capability("postcopy-ram").is_none() {
        return Some("this VM has no capability postcopy-ram".into());
    }
    let of_engine = ["xbzrle"].into_iter().filter(|_| is_sterna);
    if let Some(name) = NOT_WITH_POSTCOPY.into_iter().chain(of_engine).find(|name| is_on(name)) {
        return Some(format!("the capability {name} is on"));
    }
    if is_sterna && settings.capability("return-path") == Some(false) {
        return Some("the capability return-path is off".into());
    }
    let mode = settings.parameter("mode").and_then(Value::as_str);
    mode.filter(|mode| *mode != "normal").map(|mode| format!("the parameter mode is {mode}"))
}

/// Why postcopy does not go to `address`, as a clause.
pub fn postcopy_excluded_by_address(address: &str) -> Option<String> {
    let kind = address.split(':').next().unwrap_or_default();
    ["rdma", "file", "exec"].contains(&kind).then(|| {
        format!("the destination is {kind}:, and it needs a stream in both directions (tcp: or unix:)")
    })
}

/// All blocks that a migration moves; or what the guest was given, where the monitor has no table of them.
fn ram_bytes(vm: &mut Vm) -> Result<u64, DriveError> {
    if let Some(blocks) = vm.blocks()? {
        return Ok(blocks.iter().map(|block| block.used_bytes).sum());
    }
    let memory = vm.execute("query-memory-size-summary", Value::Null)?;
    let part = |name: &str| memory[name].as_u64().unwrap_or(0);
    Ok(part("base-memory") + part("plugged-memory"))
}

/// Measures over each of `intervals`, one after the other, in the best way that the VM has.
pub fn measure(vm: &mut Vm, intervals: &[Duration]) -> Result<Vec<Reading>, DriveError> {
    // Without KVM, QEMU's dirty-bitmap mode answers 0 whatever the guest writes (seen on 11.1.3 under TCG).
    let counts_pages = vm.is_sterna() || vm.execute("query-kvm", Value::Null)?["enabled"] == true;
    let mut modes = if counts_pages { &MODES[..] } else { &MODES[2..] };
    let mut readings = Vec::new();
    for interval in intervals {
        let interval = (*interval).clamp(SHORTEST, LONGEST);
        let mode = begin(vm, interval, &mut modes)?;
        readings.push(result(vm, interval, mode)?);
    }
    Ok(readings)
}

/// Starts a measurement in the first of `modes` that the VM takes, and leaves those that it does not take out.
fn begin(vm: &mut Vm, interval: Duration, modes: &mut &[&'static str]) -> Result<&'static str, DriveError> {
    let milliseconds = interval.as_millis() as u64;
    loop {
        let mode = modes[0];
        let mut arguments = json!({"calc-time": milliseconds, "calc-time-unit": "millisecond", "mode": mode});
        if mode == "page-sampling" {
            arguments["sample-pages"] = MOST_SAMPLES.into();
        }
        match vm.try_execute("calc-dirty-rate", arguments) {
            Ok(_) => return Ok(mode),
            // Another program's measurement, or a migration, is no matter of modes.
            Err(ClientError::Refused { desc, .. }) if modes.len() > 1 && !is_busy(&desc) => {
                *modes = &modes[1..];
            }
            Err(error) => return Err(vm.error(error)),
        }
    }
}

fn is_busy(desc: &str) -> bool {
    desc.contains("already being measured") || desc.contains("migration")
}

fn result(vm: &mut Vm, interval: Duration, mode: &str) -> Result<Reading, DriveError> {
    thread::sleep(interval);
    let began = Instant::now();
    loop {
        let answer = vm.execute("query-dirty-rate", json!({"calc-time-unit": "millisecond"}))?;
        match answer["status"].as_str() {
            Some("measured") => return Ok(read(&answer, interval, mode)),
            Some("measuring") if began.elapsed() < GRACE => thread::sleep(STEP),
            Some("measuring") => {
                return Err(DriveError::Failed(format!(
                    "{} has not finished measuring its dirty rate, {GRACE:?} after the end was due; give --dirty-rate",
                    vm.at()
                )));
            }
            _ => {
                let why = answer["x-sterna-error"].as_str().unwrap_or("no reason was given");
                return Err(DriveError::Failed(format!(
                    "{} could not measure its dirty rate: {why}",
                    vm.at()
                )));
            }
        }
    }
}

fn read(answer: &Value, interval: Duration, mode: &str) -> Reading {
    let bytes = |rate: &Value| (rate.as_f64().unwrap_or(0.0) * MEGABYTE) as u64;
    let exact = &answer["x-sterna-measured"];
    let time = |name: &str| exact[name].as_u64().map(Duration::from_micros);
    // QEMU says how long it really took, and rounds the rate to whole MB/s.
    let taken = answer["calc-time"].as_u64().filter(|taken| *taken > 0).map(Duration::from_millis);
    let interval = time("interval-us").or(taken).unwrap_or(interval);
    let distinct = answer["dirty-rate"].as_f64().unwrap_or(0.0) * MEGABYTE * interval.as_secs_f64();
    Reading {
        mode: answer["mode"].as_str().unwrap_or(mode).to_owned(),
        interval,
        distinct_bytes: exact["dirty-bytes"].as_u64().unwrap_or(distinct as u64),
        vcpu_dirty_bytes: answer["vcpu-dirty-rate"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|vcpu| bytes(&vcpu["dirty-rate"]))
            .collect(),
        sync: time("sync-us"),
        touched_bytes: exact["touched-bytes"].as_u64(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_of_qemus_answer_has_bytes_of_the_interval() {
        let answer = json!({"status": "measured", "sample-pages": 0, "dirty-rate": 40, "mode": "dirty-ring",
            "calc-time-unit": "millisecond", "start-time": 1, "calc-time": 500,
            "vcpu-dirty-rate": [{"id": 0, "dirty-rate": 30}, {"id": 1, "dirty-rate": 10}]});

        let reading = read(&answer, Duration::from_millis(500), "dirty-bitmap");

        assert_eq!(reading.distinct_bytes, 20 << 20);
        assert_eq!(reading.vcpu_dirty_bytes, [30 << 20, 10 << 20]);
        assert_eq!((reading.mode.as_str(), reading.sync), ("dirty-ring", None));
    }

    #[test]
    fn reading_of_sternas_answer_is_exact() {
        let answer = json!({"status": "measured", "dirty-rate": 3, "mode": "dirty-bitmap", "x-sterna-measured":
            {"dirty-bytes": 409_600, "interval-us": 100_200, "sync-us": 77, "touched-bytes": 8192}});

        let reading = read(&answer, Duration::from_millis(100), "dirty-bitmap");

        assert_eq!((reading.distinct_bytes, reading.touched_bytes), (409_600, Some(8192)));
        assert_eq!(reading.interval, Duration::from_micros(100_200));
        assert_eq!(reading.sync, Some(Duration::from_micros(77)));
    }
}
