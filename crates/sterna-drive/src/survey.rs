//! Measures the properties of a VM that a forecast needs: RAM, settings, and how its guest writes.
//!
//! The VM measures the guest's writes: `calc-dirty-rate` counts the distinct pages that were written in an interval.
//! Several intervals give a curve. A guest that writes the same pages again and again has a lower dirty rate over
//! longer intervals. The VM counts pages exactly where it can (`dirty-bitmap`, or `dirty-ring` where it has one).
//! Otherwise QEMU compares samples of pages, which is inaccurate.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sterna_qmp::ClientError;

use super::{DriveError, Schema, Settings, Vm};

/// Intervals that show the curve of most guests.
pub const INTERVALS: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_millis(300), Duration::from_secs(1)];
/// The interval for QEMU before 8.2, which measures in whole seconds.
const SECOND: Duration = Duration::from_secs(1);
/// The shortest interval that QEMU accepts.
pub const SHORTEST: Duration = Duration::from_millis(50);
/// The longest interval that QEMU accepts.
pub const LONGEST: Duration = Duration::from_secs(60);

/// Modes of counting, best first.
const MODES: [&str; 3] = ["dirty-bitmap", "dirty-ring", "page-sampling"];
/// Maximum of QEMU's sampled pages per GiB.
const MOST_SAMPLES: u64 = 16_384;
const STEP: Duration = Duration::from_millis(5);
/// How long a result may take after the end of its interval: RAM may be large, and the host busy.
const GRACE: Duration = Duration::from_secs(30);
/// QEMU's MB, in bytes.
const MEGABYTE: f64 = (1u64 << 20) as f64;

/// A VM's size and settings, as far as a forecast needs them.
#[derive(Debug, Clone, PartialEq)]
pub struct Survey {
    /// The `status` of `query-status`.
    pub run_state: String,
    /// RAM that a migration moves, in bytes.
    pub ram_bytes: u64,
    /// Parameter `max-bandwidth`, in bytes per second. None: no limit.
    pub max_bandwidth_bytes: Option<u64>,
    /// Parameter `avail-switchover-bandwidth`, in bytes per second. None: it is measured.
    pub switchover_bandwidth_bytes: Option<u64>,
    /// Parameter `downtime-limit`.
    pub downtime_limit: Duration,
    /// Parameter `max-postcopy-bandwidth`, in bytes per second. None: no limit.
    pub max_postcopy_bandwidth_bytes: Option<u64>,
    /// The reason why these settings exclude postcopy, as a clause.
    pub postcopy_excluded: Option<String>,
    /// Whether the VM has the capability `postcopy-ram`, on or off.
    pub has_postcopy: bool,
}

/// A measurement of the guest's writes over one interval.
#[derive(Debug, Clone, PartialEq)]
pub struct Reading {
    /// Mode of counting, under QEMU's name.
    pub mode: String,
    /// Length of the interval.
    pub interval: Duration,
    /// Bytes of distinct pages that were written in the interval.
    pub distinct_bytes: u64,
    /// Dirty rate of each vCPU, in bytes per second. Empty if the VM does not report it.
    pub vcpu_dirty_bytes: Vec<u64>,
    /// Duration of the sync. Only Sterna reports it.
    pub sync: Option<Duration>,
    /// RAM that the guest has ever touched, in bytes. Only Sterna reports it.
    pub touched_bytes: Option<u64>,
}

impl Survey {
    /// Queries `vm`.
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
            has_postcopy: settings.capability("postcopy-ram").is_some(),
        })
    }
}

impl Survey {
    /// The settings of a migration that libvirt starts: it sets the limit of the bandwidth and the capabilities itself, so those
    /// that a QEMU has between migrations do not count.
    pub fn under_libvirt(self) -> Self {
        let has_postcopy = self.has_postcopy;
        let excluded = (!has_postcopy).then(|| NO_POSTCOPY.to_owned());
        Self { max_bandwidth_bytes: None, postcopy_excluded: excluded, ..self }
    }
}

const NO_POSTCOPY: &str = "this VM has no capability postcopy-ram";

/// Capabilities that exclude `postcopy-ram`.
const NOT_WITH_POSTCOPY: [&str; 4] = ["mapped-ram", "x-ignore-shared", "background-snapshot", "x-colo"];

fn postcopy_excluded(settings: &Settings, is_sterna: bool) -> Option<String> {
    let is_on = |name: &str| settings.capability(name) == Some(true);
    if settings.capability("postcopy-ram").is_none() {
        return Some(NO_POSTCOPY.into());
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

/// The reason why postcopy is impossible to `address`, as a clause.
pub fn postcopy_excluded_by_address(address: &str) -> Option<String> {
    let kind = address.split(':').next().unwrap_or_default();
    ["rdma", "file", "exec"].contains(&kind).then(|| {
        format!("the destination is {kind}:, and it needs a stream in both directions (tcp: or unix:)")
    })
}

/// Size of all blocks that a migration moves. If the monitor has no table of blocks: the guest's configured RAM.
fn ram_bytes(vm: &mut Vm) -> Result<u64, DriveError> {
    if let Some(blocks) = vm.blocks()? {
        return Ok(blocks.iter().map(|block| block.used_bytes).sum());
    }
    let memory = vm.execute("query-memory-size-summary", Value::Null)?;
    let part = |name: &str| memory[name].as_u64().unwrap_or(0);
    Ok(part("base-memory") + part("plugged-memory"))
}

/// Measures over each of `intervals`, one after the other, in the best mode that the VM knows. For a VM that measures
/// in whole seconds, each interval is rounded up, and equal intervals are measured once.
///
/// # Errors
/// [`DriveError::Unfit`]: this VM cannot measure. Nothing was changed.
pub fn measure(vm: &mut Vm, intervals: &[Duration]) -> Result<Vec<Reading>, DriveError> {
    vm.must_have("calc-dirty-rate", "give the rate with --dirty-rate")?;
    let knows = Measuring::of(vm.schema()?);
    // Without KVM, QEMU's dirty-bitmap mode answers 0 even if the guest writes (observed with 11.1.3 under TCG).
    let counts_pages = vm.is_sterna() || vm.execute("query-kvm", Value::Null)?["enabled"] == true;
    let mut modes = if counts_pages && knows.modes { &MODES[..] } else { &MODES[2..] };
    let mut readings = Vec::new();
    for interval in knows.intervals(intervals) {
        let mode = begin(vm, knows, interval, &mut modes)?;
        readings.push(result(vm, knows, interval, mode)?);
    }
    Ok(readings)
}

/// The arguments that a VM's `calc-dirty-rate` knows.
#[derive(Debug, Clone, Copy)]
struct Measuring {
    /// Intervals in milliseconds. QEMU 8.2 or later.
    milliseconds: bool,
    /// Modes other than sampling. QEMU 6.2 or later.
    modes: bool,
    /// A parameter for the number of sampled pages. QEMU 6.1 or later.
    samples: bool,
}

impl Measuring {
    fn of(schema: &Schema) -> Self {
        let takes = |argument: &str| schema.takes("calc-dirty-rate", argument);
        Self {
            milliseconds: takes("calc-time-unit") && schema.takes("query-dirty-rate", "calc-time-unit"),
            modes: takes("mode"),
            samples: takes("sample-pages"),
        }
    }

    /// Rounds and limits the intervals `wanted` to those that the VM can measure.
    fn intervals(self, wanted: &[Duration]) -> Vec<Duration> {
        let mut intervals: Vec<Duration> = Vec::new();
        for interval in wanted.iter().map(|interval| (*interval).clamp(SHORTEST, LONGEST)) {
            let whole = Duration::from_secs(interval.as_secs() + u64::from(interval.subsec_nanos() > 0));
            let interval = if self.milliseconds { interval } else { whole.max(SECOND) };
            if self.milliseconds || !intervals.contains(&interval) {
                intervals.push(interval);
            }
        }
        intervals
    }
}

/// Starts a measurement in the first mode that the VM accepts. Removes the refused ones from `modes`.
fn begin(
    vm: &mut Vm,
    knows: Measuring,
    interval: Duration,
    modes: &mut &[&'static str],
) -> Result<&'static str, DriveError> {
    loop {
        let mode = modes[0];
        let mut arguments = if knows.milliseconds {
            json!({"calc-time": interval.as_millis() as u64, "calc-time-unit": "millisecond"})
        } else {
            json!({"calc-time": interval.as_secs()})
        };
        if knows.modes {
            arguments["mode"] = mode.into();
        }
        if mode == "page-sampling" && knows.samples {
            arguments["sample-pages"] = MOST_SAMPLES.into();
        }
        match vm.try_execute("calc-dirty-rate", arguments) {
            Ok(_) => return Ok(mode),
            // A refusal because of another program's measurement, or a migration, does not depend on the mode.
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

fn result(vm: &mut Vm, knows: Measuring, interval: Duration, mode: &str) -> Result<Reading, DriveError> {
    let unit = if knows.milliseconds { json!({"calc-time-unit": "millisecond"}) } else { Value::Null };
    thread::sleep(interval);
    let began = Instant::now();
    loop {
        let answer = vm.execute("query-dirty-rate", unit.clone())?;
        match answer["status"].as_str() {
            Some("measured") => return Ok(read(&answer, interval, mode)),
            Some("measuring") if began.elapsed() < GRACE => thread::sleep(STEP),
            Some("measuring") => {
                return Err(DriveError::Failed(format!(
                    "{} has not finished measuring its dirty rate {GRACE:?} after the expected end; give --dirty-rate",
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
    // QEMU rounds the rate to whole MB/s, and reports the real duration.
    let unit =
        if answer["calc-time-unit"] == "millisecond" { Duration::from_millis } else { Duration::from_secs };
    let taken = answer["calc-time"].as_u64().filter(|taken| *taken > 0).map(unit);
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
    fn reading_of_an_answer_without_unit_is_of_whole_seconds() {
        let answer = json!({"status": "measured", "sample-pages": 16384, "dirty-rate": 7, "mode": "page-sampling",
            "start-time": 1, "calc-time": 2});

        let reading = read(&answer, Duration::from_secs(1), "page-sampling");

        assert_eq!((reading.interval, reading.distinct_bytes), (Duration::from_secs(2), 14 << 20));
    }

    #[test]
    fn settings_between_migrations_do_not_count_under_libvirt() {
        let stands = Survey {
            run_state: "running".into(),
            ram_bytes: 1 << 30,
            max_bandwidth_bytes: Some(128 << 20),
            switchover_bandwidth_bytes: None,
            downtime_limit: Duration::from_millis(300),
            max_postcopy_bandwidth_bytes: None,
            postcopy_excluded: Some("the capability mapped-ram is on".into()),
            has_postcopy: true,
        };

        let under = stands.clone().under_libvirt();

        assert_eq!((under.max_bandwidth_bytes, under.postcopy_excluded), (None, None));
        let without = Survey { has_postcopy: false, ..stands }.under_libvirt();
        assert_eq!(without.postcopy_excluded.as_deref(), Some(NO_POSTCOPY));
    }

    #[test]
    fn intervals_of_a_vm_that_measures_whole_seconds_are_rounded_up_and_come_once() {
        let old = Measuring { milliseconds: false, modes: true, samples: true };
        let wanted = [100, 300, 1000, 1500, 9_000_000].map(Duration::from_millis);

        assert_eq!(old.intervals(&wanted), [1, 2, 60].map(Duration::from_secs));
        assert_eq!(Measuring { milliseconds: true, ..old }.intervals(&wanted[..3]), wanted[..3]);
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
