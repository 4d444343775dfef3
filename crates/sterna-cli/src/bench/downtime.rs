//! Measures the pause, setting by setting: every setting once in turn, so that a noisy neighbour hits all alike.

use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use sterna::{Address, Arrival, Capabilities, Incoming, Migration, Outcome, Parameters, SourceVm, TargetVm};

use super::device::BenchDevice;
use super::machine::Machine;
use super::sample::{Distribution, Sample};
use crate::commands::bench::Downtime;
use crate::exit::{Status, Stop};
use crate::interrupts::Interrupts;
use crate::terminal;

/// A median that is known to so much of itself is known well enough.
const STABLE: f64 = 0.02;
/// Runs of a setting, at least, before that counts.
const LEAST_RUNS: usize = 15;

/// One setting and what was measured.
#[derive(Debug, Clone, Serialize)]
pub struct Setting {
    /// Devices of the VM.
    pub devices: u32,
    /// multifd channels; 0: the main channel alone.
    pub channels: u8,
    /// Every run.
    pub samples: Vec<Sample>,
}

impl Setting {
    /// One figure of all runs.
    pub fn distribution(&self, of: impl Fn(&Sample) -> f64) -> Distribution {
        Distribution::new(self.samples.iter().map(of))
    }

    /// Of the pauses.
    pub fn downtime(&self) -> Distribution {
        self.distribution(|sample| sample.downtime)
    }

    fn is_stable(&self) -> bool {
        self.samples.len() >= LEAST_RUNS
            && self.downtime().uncertainty().is_some_and(|uncertainty| uncertainty <= STABLE)
    }
}

/// All of it.
#[derive(Debug, Clone, Serialize)]
pub struct Results {
    /// State of each device, bytes.
    pub state_bytes: u64,
    /// Reading and loading, bytes per second; 0: no limit.
    pub device_rate: u64,
    /// Percent that can be read while the guest runs.
    pub precopy_percent: u8,
    /// Every setting: by devices, then channels.
    pub settings: Vec<Setting>,
}

impl Results {
    /// As JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }
}

/// Measures all settings, until they are stable or have had their runs.
///
/// # Errors
/// A migration failed, or a device arrived that is not what left.
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
    let seen = interrupts.count();
    let began = Instant::now();
    for run in 0..arguments.runs {
        if settings.iter().all(Setting::is_stable) {
            break;
        }
        for setting in settings.iter_mut().filter(|setting| !setting.is_stable()) {
            if interrupts.count() > seen {
                return Err(Stop::with(Status::Cancelled, "interrupted".to_owned()));
            }
            setting.samples.push(one(arguments, &devices, setting)?);
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
        precopy_percent: arguments.precopy,
        settings,
    })
}

type Devices = (Vec<Arc<BenchDevice>>, Vec<Arc<BenchDevice>>);

/// One migration.
fn one(arguments: &Downtime, devices: &Devices, setting: &Setting) -> Result<Sample, Stop> {
    let count = setting.devices as usize;
    let (from, to) = (&devices.0[..count], &devices.1[..count]);
    from.iter().chain(to).for_each(|device| device.rewind());
    let stop = |error: &dyn std::fmt::Display| Stop::failed(format!("bench downtime: {error}"));
    let source = Machine::new(arguments.ram, from, true).map_err(|error| stop(&error))?;
    let target = Machine::new(arguments.ram, to, false).map_err(|error| stop(&error))?;
    let params = Parameters {
        max_bandwidth_bytes: 0,
        multifd_channels: setting.channels.max(1),
        max_queued_stream_bytes: arguments.queue,
        // The pause is what is measured: it may be as long as it is.
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
    if let Some((number, _)) = from.iter().zip(to).enumerate().find(|(_, (from, to))| !from.arrived_as(to)) {
        let text = format!("the state of device {number} is not what it was");
        return Err(Stop::with(Status::Damaged, text));
    }
    Ok(Sample::of(&migration.statistics(), &incoming.statistics()))
}
