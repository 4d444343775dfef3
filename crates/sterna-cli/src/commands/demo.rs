//! `sterna demo`: migrates a guest that writes its memory, and checks that the memory arrived intact.
//!
//! The guest arrives throttled to one step per second, so that it overwrites almost no received page before
//! the check. Then its rate is restored, the guest must make progress, and its memory is checked again.

mod linux;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use self::linux::Linux;
use super::run::{LoadArguments, MachineKind};
use super::{CapabilityState, capability, migrate, pair};
use crate::children::VmProcess;
use crate::exit::{Done, Status, Stop};
use crate::host::GuestProgress;
use crate::interrupts::Interrupts;
use crate::monitor::Monitor;
use crate::record::{Check, Cpu, Guest, Record, Report};
use crate::terminal::{self, Live, Shown};
use crate::{summary, units, watch};

/// A guest that gets CPU time checks its beats at least this often.
const BEAT_SECONDS: f64 = 0.001;
/// The check reads all of the guest's RAM.
const CHECK_LIMIT: Duration = Duration::from_secs(300);
/// How long the demo waits until the guest makes progress.
const LIFE_LIMIT: Duration = Duration::from_secs(30);

/// Machines, guest and migration of the demo.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    /// Machine that runs the guest
    #[arg(long, value_enum, default_value_t = MachineKind::Auto)]
    pub machine: MachineKind,
    /// Boot a Linux kernel as the guest. Its only process is this program, which writes memory and checks it. Needs
    /// hardware virtualisation
    #[arg(long, conflicts_with_all = ["machine", "pattern", "rate"])]
    pub linux: bool,
    /// Linux kernel for --linux: a bzImage or a vmlinux [default: the kernel of this host]
    #[arg(long, value_name = "FILE", requires = "linux")]
    pub kernel: Option<PathBuf>,
    /// Size of the guest's RAM, such as 512M or 4G
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = units::parse_ram)]
    pub ram: u64,
    /// Number of vCPUs, 1 to 8 (of threads with `--machine process`)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub vcpus: u8,
    /// Memory writes of the guest.
    #[command(flatten)]
    pub load: LoadArguments,
    /// Address on this host at which the destination listens, such as rdma:HOST:PORT (`sterna rdma` shows the host's
    /// address)
    #[arg(long, value_name = "ADDRESS", default_value = "tcp:127.0.0.1:0", value_parser = migrate::address)]
    pub address: String,
    /// Number of multifd channels; 0: everything over the main channel
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub channels: u8,
    /// Migration parameter under QEMU's name, such as max-bandwidth=1G [default: no bandwidth limit]
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair)]
    pub set: Vec<(String, String)>,
    /// Migration capability under QEMU's name, such as rdma-pin-all
    #[arg(long, value_name = "NAME[=on|off]", value_parser = capability)]
    pub cap: Vec<CapabilityState>,
    /// Switch to postcopy: start the guest at the destination before all of its memory has arrived. WHEN is `auto` (if
    /// precopy does not converge) or a number of seconds after the start of the migration
    #[arg(long, value_name = "WHEN", value_parser = migrate::postcopy_when, num_args = 0..=1, default_missing_value = "auto")]
    pub postcopy: Option<migrate::PostcopyWhen>,
    /// Print a forecast of the migration first
    #[arg(long)]
    pub forecast: bool,
    /// Bandwidth of the link for the forecast, such as 20Gbit/s; required unless `--set max-bandwidth` limits it
    #[arg(long, value_name = "RATE", value_parser = units::parse_bandwidth, requires = "forecast")]
    pub bandwidth: Option<u64>,
    /// Use TLS with the certificates in this directory (QEMU's file names; the server's certificate must be for
    /// 127.0.0.1)
    #[arg(long, value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
    /// Time in seconds for which the guest runs before the migration starts
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = parse_seconds)]
    pub warm_up: f64,
    /// Print the record as JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// How progress is shown.
    #[command(flatten)]
    pub shown: Shown,
    /// Write the record to a file, for `sterna report`
    #[arg(long, value_name = "FILE.json")]
    pub report: Option<PathBuf>,
}

/// Runs the demo and prints its result.
pub fn execute(arguments: &Arguments) -> Done {
    if arguments.forecast && arguments.bandwidth.is_none() && !limits_bandwidth(&arguments.set) {
        return Err(Stop::usage(
            "a forecast needs the link's bandwidth: give --bandwidth, or a limit with --set max-bandwidth=…",
        ));
    }
    let interrupts = Interrupts::catch()?;
    let (kind, remark) = if arguments.linux { MachineKind::Kvm } else { arguments.machine }.settle()?;
    let live = Live::new(arguments.shown, arguments.json);
    let report = arguments.report.as_deref().map(Report::begin).transpose()?;
    if let Some(remark) = &remark {
        live.note(remark);
    }
    let directory = tempfile::Builder::new().prefix("sterna-demo-").tempdir().map_err(|error| {
        Stop::failed(format!(
            "cannot create a directory for the VMs' sockets: {error}. Set TMPDIR to a directory with \
                              space."
        ))
    })?;
    let linux =
        arguments.linux.then(|| Linux::prepare(arguments.kernel.as_deref(), directory.path())).transpose()?;
    let start = |name, incoming| {
        let line = vm_arguments(arguments, kind, linux.as_ref(), incoming);
        VmProcess::start(name, directory.path(), &line)
    };
    let (mut source, mut destination) = (start("source", false)?, start("destination", true)?);
    let (mut at_source, mut at_destination) = (source.monitor()?, destination.monitor()?);

    warm_up(arguments, linux.as_ref(), &mut at_source, &interrupts)?;
    let before = (source.cpu_seconds(), destination.cpu_seconds());
    let order = order(arguments, &at_source, &at_destination);
    let mut record = migrate::drive(&order, &mut at_source, Some(&mut at_destination), &live, &interrupts)?;
    let after = (source.cpu_seconds(), destination.cpu_seconds());
    live.end();

    record.source = "source".into();
    record.machine = Some(kind.as_str().into());
    record.cpu = spent(before, after);
    let end = watch::end(&record, &mut at_source);
    if end.is_ok() {
        let (check, guest) = match &linux {
            Some(linux) => (linux.prove()?, None),
            None => prove(arguments, &mut at_destination)?,
        };
        (record.check, record.guest) = (Some(check), guest);
    }
    if let Some(report) = report {
        report.write(&record)?;
    }
    terminal::print(&if arguments.json { record.to_json() } else { closing(&record) });
    source.quit(&mut at_source)?;
    destination.quit(&mut at_destination)?;
    end?;
    match record.check {
        Some(Check { passed: false, summary }) => Err(Stop::with(
            Status::Damaged,
            format!("the guest's memory at the destination differs from its memory at the source: {summary}"),
        )),
        _ => Ok(Status::Done),
    }
}

/// Whether a `max-bandwidth` other than 0 is set. A value that is no number counts as a limit here; setting
/// it fails later.
fn limits_bandwidth(set: &[(String, String)]) -> bool {
    let last = set.iter().rev().find(|(name, _)| name == "max-bandwidth");
    let bytes = |value: &str| value.parse::<u64>().ok().or_else(|| units::parse_size(value).ok());
    last.is_some_and(|(_, value)| bytes(value) != Some(0))
}

fn vm_arguments(
    arguments: &Arguments,
    kind: MachineKind,
    linux: Option<&Linux>,
    incoming: bool,
) -> Vec<String> {
    let mut line = vec![
        format!("--machine={}", kind.as_str()),
        format!("--ram={}b", arguments.ram),
        format!("--vcpus={}", arguments.vcpus),
    ];
    if let Some(linux) = linux {
        line.extend(linux.arguments(incoming));
        return line;
    }
    if incoming {
        // See the module's description.
        line.extend(["--incoming=defer".into(), "--arrival-rate=1".into()]);
    }
    line.extend(arguments.load.to_arguments());
    line
}

fn order(arguments: &Arguments, source: &Monitor, destination: &Monitor) -> migrate::Arguments {
    let multifd = arguments.channels > 0;
    let mut set = vec![("max-bandwidth".to_owned(), "0".to_owned())];
    if multifd {
        set.push(("multifd-channels".into(), arguments.channels.to_string()));
    }
    set.extend(arguments.set.iter().cloned());
    let mut cap = arguments.cap.clone();
    cap.extend(multifd.then(|| ("multifd".to_owned(), true)));
    migrate::Arguments {
        tls_dir: arguments.tls_dir.clone(),
        socket: source.endpoint().clone(),
        destination: arguments.address.clone(),
        dest_qmp: Some(destination.endpoint().clone()),
        paused: false,
        postcopy: arguments.postcopy,
        reconnect_window: None,
        same_host: false,
        set,
        cap,
        keep_settings: false,
        via: None,
        forecast: arguments.forecast,
        bandwidth: arguments.bandwidth,
        json: arguments.json,
        shown: arguments.shown,
        report: None,
        undecided_wait: 30,
    }
}

/// Lets the guest write for a while, and fails if it makes no progress.
fn warm_up(
    arguments: &Arguments,
    linux: Option<&Linux>,
    source: &mut Monitor,
    interrupts: &Interrupts,
) -> Result<(), Stop> {
    match linux {
        Some(linux) => linux.wait_for_life()?,
        None => wait_for_life(source)?,
    }
    interrupts.sleep(Duration::from_secs_f64(arguments.warm_up), 0);
    if interrupts.count() > 0 {
        return Err(Stop::with(Status::Cancelled, "cancelled before the migration began."));
    }
    if linux.is_some() {
        return Ok(());
    }
    source.execute("x-sterna-set-guest", json!({ "reset-gap": true })).map(drop)
}

/// Checks the memory on arrival, restores the guest's rate, and checks the memory again.
fn prove(arguments: &Arguments, destination: &mut Monitor) -> Result<(Check, Option<Guest>), Stop> {
    let gap = progress(destination)?.longest_gap_seconds;
    destination.set_limit(Some(CHECK_LIMIT));
    let arrived = destination.execute("x-sterna-check-guest", Value::Null)?;
    destination.execute("x-sterna-set-guest", json!({ "rate": arguments.load.rate }))?;
    let went_on = wait_for_life(destination);
    let later = destination.execute("x-sterna-check-guest", Value::Null)?;
    destination.set_limit(None);
    let whole = |check: &Value| check["consistent"] == true;
    let summary = |check: &Value| check["summary"].as_str().unwrap_or_default().to_owned();
    let check = if !whole(&arrived) {
        Check { passed: false, summary: summary(&arrived) }
    } else if let Err(stop) = went_on {
        Check {
            passed: false,
            summary: format!("its memory arrived complete, and then it stopped: {}", stop.message),
        }
    } else if !whole(&later) {
        Check {
            passed: false,
            summary: format!("its memory arrived complete and was damaged later: {}", summary(&later)),
        }
    } else {
        Check {
            passed: true,
            summary: format!("{}; it continued to run and was checked again", summary(&arrived)),
        }
    };
    let guest = gap.map(|downtime_seconds| Guest { downtime_seconds, resolution_seconds: BEAT_SECONDS });
    Ok((check, guest))
}

/// Waits until every vCPU has made progress.
fn wait_for_life(monitor: &mut Monitor) -> Result<(), Stop> {
    let before = progress(monitor)?;
    let deadline = Instant::now() + LIFE_LIMIT;
    loop {
        let now = progress(monitor)?;
        let moved = |now: &[u64], then: &[u64]| {
            !now.is_empty() && now.iter().enumerate().all(|(at, n)| *n > then.get(at).copied().unwrap_or(0))
        };
        if moved(&now.steps, &before.steps) || (now.steps == before.steps && moved(&now.beats, &before.beats))
        {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Stop::failed(format!("the guest made no progress for {LIFE_LIMIT:?}")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn progress(monitor: &mut Monitor) -> Result<GuestProgress, Stop> {
    let answer = monitor.execute("x-sterna-query-guest", Value::Null)?;
    serde_json::from_value(answer).map_err(|error| Stop::failed(format!("cannot query the guest: {error}")))
}

fn spent(before: (Option<f64>, Option<f64>), after: (Option<f64>, Option<f64>)) -> Option<Cpu> {
    Some(Cpu { source_seconds: after.0? - before.0?, destination_seconds: after.1? - before.1? })
}

fn closing(record: &Record) -> String {
    let table = summary::table(record);
    match &record.check {
        Some(check) if check.passed => {
            format!(
                "{table}\n\n{}",
                terminal::verdict(true, "every page arrived, and the guest continues to run")
            )
        }
        Some(_) => {
            format!("{table}\n\n{}", terminal::verdict(false, "the guest was damaged during the migration"))
        }
        None => table,
    }
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number of seconds from 0 to 3600".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn max_bandwidth_limits_unless_it_is_nought_and_the_last_one_counts() {
        let limits = |values: &[&str]| {
            let set: Vec<_> = values.iter().map(|value| ("max-bandwidth".into(), (*value).into())).collect();
            limits_bandwidth(&set)
        };

        assert!(limits(&["0.5G"]) && limits(&["012"]) && limits(&["0", "1M"]));
        assert!(!limits(&[]) && !limits(&["0"]) && !limits(&["0M"]) && !limits(&["1M", "0.0G"]));
    }
}
