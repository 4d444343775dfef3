//! Measures the downtime of every setting.
//! Settings take turns, run by run, so that a disturbance of the host affects all of them equally.

use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use sterna::{Address, Arrival, Capabilities, Incoming, Migration, Outcome, Parameters, SourceVm, TargetVm};

use super::device::BenchDevice;
use super::limit;
use super::machine::Machine;
use super::sample::{Distribution, Sample};
use crate::bench::options::Downtime;
use crate::exit::{Status, Stop};
use crate::interrupts::Interrupts;
use crate::terminal;

/// Relative uncertainty of the median below which a setting needs no more runs.
const STABLE: f64 = 0.02;
/// Minimum number of runs per setting before its uncertainty is considered.
const LEAST_RUNS: usize = 15;

/// One setting and its measurements.
#[derive(Debug, Clone, Serialize)]
pub struct Setting {
    /// Devices of the VM.
    pub devices: u32,
    /// multifd channels; 0: only the main channel.
    pub channels: u8,
    /// The measurements of all runs, in order.
    pub samples: Vec<Sample>,
}

impl Setting {
    /// The distribution of one measured value over all runs.
    pub fn distribution(&self, of: impl Fn(&Sample) -> f64) -> Distribution {
        Distribution::new(self.samples.iter().map(of))
    }

    /// The distribution of the downtime, milliseconds.
    pub fn downtime(&self) -> Distribution {
        self.distribution(|sample| sample.downtime)
    }

    fn is_stable(&self) -> bool {
        self.samples.len() >= LEAST_RUNS
            && self.downtime().uncertainty().is_some_and(|uncertainty| uncertainty <= STABLE)
    }
}

/// Plain copies of the same devices, without a migration. They take turns with the settings.
#[derive(Debug, Clone, Serialize)]
pub struct Plain {
    /// Number of devices copied.
    pub devices: u32,
    /// Milliseconds from the first byte read to the last byte loaded, for every run.
    pub times: Vec<f64>,
}

/// The results of all settings, with the parameters of the benchmark.
#[derive(Debug, Clone, Serialize)]
pub struct Results {
    /// State of each device, bytes.
    pub state_bytes: u64,
    /// Rate of reading and loading, bytes per second; 0: no limit.
    pub device_rate: u64,
    /// Bandwidth limit of the source, bytes per second; 0: no limit.
    pub max_bandwidth: u64,
    /// Percent of the state that can be read while the guest runs.
    pub precopy_percent: u8,
    /// Every setting, ordered by devices, then by channels.
    pub settings: Vec<Setting>,
    /// For each number of devices, the plain copies: a lower bound of the downtime.
    pub plain: Vec<Plain>,
}

impl Results {
    /// The results as indented JSON, with a newline at the end.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }
}

/// Measures all settings until they are stable or have reached their number of runs.
///
/// # Errors
/// A migration failed, or the loaded state of a device differs from the state that was sent.
pub fn measure(arguments: &Downtime, interrupts: &Interrupts) -> Result<Results, Stop> {
    let most = arguments.devices.iter().copied().max().unwrap_or(1);
    let bytes = usize::try_from(arguments.state).map_err(|_| Stop::usage("--state is too large"))?;
    let make = |is_source| -> Vec<Arc<BenchDevice>> {
        let device =
            |number| BenchDevice::new(number, bytes, arguments.precopy, arguments.device_rate, is_source);
        (0..most).map(device).collect()
    };
    let devices = (make(true), make(false));
    let settings = arguments.devices.iter().flat_map(|devices| {
        let channels = arguments.channels.iter();
        channels.map(|channels| Setting { devices: *devices, channels: *channels, samples: Vec::new() })
    });
    let mut settings: Vec<Setting> = settings.collect();
    let plain = arguments.devices.iter().map(|devices| Plain { devices: *devices, times: Vec::new() });
    let mut plain: Vec<Plain> = plain.collect();
    let began = Instant::now();
    for run in 0..arguments.runs {
        if settings.iter().all(Setting::is_stable) {
            break;
        }
        for setting in settings.iter_mut().filter(|setting| !setting.is_stable()) {
            if interrupts.count() > 0 {
                return Err(Stop::with(Status::Cancelled, "interrupted".to_owned()));
            }
            setting.samples.push(one(arguments, &devices, setting)?);
        }
        for plain in &mut plain {
            plain.times.push(one_plain(&devices, plain.devices)?);
        }
        let done =
            format!("run {} of at most {}, {:.0} s", run + 1, arguments.runs, began.elapsed().as_secs_f64());
        if !arguments.json {
            terminal::note(&done);
        }
    }
    Ok(Results {
        state_bytes: arguments.state,
        device_rate: arguments.device_rate,
        max_bandwidth: arguments.max_bandwidth,
        precopy_percent: arguments.precopy,
        settings,
        plain,
    })
}

type Devices = (Vec<Arc<BenchDevice>>, Vec<Arc<BenchDevice>>);

/// Runs one plain copy. Returns its time in milliseconds.
fn one_plain(devices: &Devices, count: u32) -> Result<f64, Stop> {
    let (from, to) = rewound(devices, count);
    let took = limit::plain(from, to).map_err(|error| stop(&error))?;
    check(from, to)?;
    Ok(took.as_secs_f64() * 1e3)
}

/// Runs one migration with the devices and channels of `setting`.
fn one(arguments: &Downtime, devices: &Devices, setting: &Setting) -> Result<Sample, Stop> {
    let (from, to) = rewound(devices, setting.devices);
    let source = Machine::new(arguments.ram, from, true).map_err(|error| stop(&error))?;
    let target = Machine::new(arguments.ram, to, false).map_err(|error| stop(&error))?;
    let params = Parameters {
        max_bandwidth_bytes: arguments.max_bandwidth,
        multifd_channels: setting.channels.max(1),
        max_queued_stream_bytes: arguments.queue,
        // The benchmark measures the downtime, so a downtime limit must not delay the switchover.
        downtime_limit: std::time::Duration::from_secs(60),
        ..Parameters::default()
    };
    let capabilities = Capabilities { multifd: setting.channels > 0, ..Capabilities::default() };
    let at: Address = "tcp:127.0.0.1:0".parse().map_err(|error| stop(&error))?;
    let vm: Arc<dyn TargetVm> = target;
    let incoming = Incoming::listen(vm, &at, params.clone(), capabilities, Arc::new(()))
        .map_err(|error| stop(&error))?;
    let vm: Arc<dyn SourceVm> = source;
    let migration = Migration::start(vm, &incoming.address(), params, capabilities, Arc::new(()))
        .map_err(|error| stop(&error))?;
    let outcome = migration.wait();
    if let Arrival::Failed(error) = incoming.wait() {
        return Err(stop(&error));
    }
    if let Outcome::Failed { error, .. } = outcome {
        return Err(stop(&error));
    }
    check(from, to)?;
    Ok(Sample::of(&migration.statistics(), &incoming.statistics()))
}

/// The first `count` devices of both sides, reset for a run.
fn rewound(devices: &Devices, count: u32) -> (&[Arc<BenchDevice>], &[Arc<BenchDevice>]) {
    let count = count as usize;
    let (from, to) = (&devices.0[..count], &devices.1[..count]);
    from.iter().chain(to).for_each(|device| device.rewind());
    (from, to)
}

/// Fails if the loaded state of a device differs from the state that was sent.
fn check(from: &[Arc<BenchDevice>], to: &[Arc<BenchDevice>]) -> Result<(), Stop> {
    if let Some((number, _)) = from.iter().zip(to).enumerate().find(|(_, (from, to))| !from.arrived_as(to)) {
        let text = format!("the state of device {number} changed during the migration");
        return Err(Stop::with(Status::Damaged, text));
    }
    Ok(())
}

fn stop(error: &dyn std::fmt::Display) -> Stop {
    Stop::failed(format!("bench downtime: {error}"))
}
