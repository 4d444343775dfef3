//! `sterna plan`: forecasts a migration, and advises what to change so that it converges.

use std::path::PathBuf;
use std::time::Duration;

use sterna_drive::{MonitorAddress, survey};

use crate::exit::{Done, Status, Stop};
use crate::libvirt;
use crate::monitor::Monitor;
use crate::plan::{self, Plan, live::Stated};
use crate::record::write_whole;
use crate::terminal;
use crate::units::{parse_bandwidth, parse_ram, parse_rate, parse_size, parse_time};

/// Rates, or a VM to measure.
#[derive(Debug, clap::Args)]
#[command(after_long_help = libvirt::HELP)]
pub struct Arguments {
    /// QMP socket of a running Sterna VM or QEMU, whose writes are measured: unix:PATH, a path, or tcp:HOST:PORT.
    /// Or a domain of libvirt, libvirt:NAME: the plan then assumes the settings of `virsh migrate`. Without a socket, --bandwidth, --dirty-rate and --sync are required
    pub socket: Option<MonitorAddress>,
    #[command(flatten)]
    figures: Figures,
    /// Print the plan as JSON
    #[arg(long)]
    pub json: bool,
    /// Write a picture: remaining bytes over time, and the required downtime limit over the dirty rate
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
}

/// What an operator may state.
#[derive(Debug, Clone, clap::Args)]
pub struct Figures {
    /// Bandwidth of the link, such as 15GB/s, 1.2GiB/s or 10Gbit/s. The VM's max-bandwidth limits it except during the
    /// switchover
    #[arg(long, value_name = "RATE", value_parser = parse_bandwidth)]
    bandwidth: Option<u64>,
    /// Assume this value instead of the VM's max-bandwidth
    #[arg(long, value_name = "RATE", value_parser = parse_bandwidth)]
    max_bandwidth: Option<u64>,
    /// Distinct bytes that the guest writes per second; with a VM, this replaces the measurement
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    dirty_rate: Option<u64>,
    /// Time that one sync (a query for dirty pages) takes, such as 73ms
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    sync: Option<Duration>,
    /// Longest acceptable downtime [default: the VM's downtime-limit, or 300ms]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    downtime_limit: Option<Duration>,
    /// Size of the guest's RAM, to forecast rounds, total time and downtime
    #[arg(long, value_name = "SIZE", value_parser = parse_ram)]
    ram: Option<u64>,
    /// Size of the RAM that the guest has ever written; other pages are zero and cost almost nothing [default: the size
    /// that a Sterna VM reports, else all RAM]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    to_send: Option<u64>,
    /// Time that stopping the guest, its devices and starting it add to the downtime [default: 0, or 4ms for a VM]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    fixed: Option<Duration>,
    /// Time after the start of the migration when postcopy starts, as with `sterna migrate --postcopy SECONDS`
    /// [default: when precopy makes no more progress]
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    postcopy_after: Option<Duration>,
    /// Number of precopy rounds after which postcopy starts, as with `sterna migrate --postcopy Nrounds`
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    postcopy_after_rounds: Option<u32>,
    /// Uncertainty of bandwidth and dirty rate, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 10, value_parser = clap::value_parser!(u8).range(0..=90))]
    uncertainty: u8,
    /// Intervals over which the VM's dirty rate is measured, 50ms to 60s each [default: 100ms,300ms,1s]
    #[arg(long, value_name = "TIME,…", value_delimiter = ',', value_parser = interval)]
    intervals: Vec<Duration>,
    /// Address of the destination, such as tcp:HOST:PORT. The plan proposes postcopy only if it works with this kind of
    /// address
    #[arg(long, value_name = "ADDRESS", value_parser = super::migrate::address)]
    to: Option<String>,
}

fn interval(text: &str) -> Result<Duration, String> {
    let time = parse_time(text)?;
    if !(survey::SHORTEST..=survey::LONGEST).contains(&time) {
        return Err(format!("`{text}` is not between 50ms and 60s"));
    }
    Ok(time)
}

/// Makes the plan and prints it.
pub fn execute(arguments: &Arguments) -> Done {
    let stated = arguments.figures.stated();
    let plan = match &arguments.socket {
        Some(socket) => {
            let mut monitor = Monitor::connect(socket)?;
            stated.plan_for(&mut monitor)?
        }
        None => from_figures(&stated)?,
    };
    if let Some(file) = &arguments.svg {
        write_whole(file, &plan::picture(&plan))?;
        terminal::note(&format!("wrote {}", file.display()));
    }
    terminal::print(&if arguments.json { plan.to_json() } else { plan::table(&plan) });
    Ok(Status::Done)
}

/// A plan without a VM; all values must be given.
fn from_figures(stated: &Stated) -> Result<Plan, Stop> {
    let missing: Vec<&str> = [
        ("--bandwidth", stated.bandwidth_bytes.is_none()),
        ("--dirty-rate", stated.dirty_bytes.is_none()),
        ("--sync", stated.sync.is_none()),
    ]
    .into_iter()
    .filter_map(|(name, is_missing)| is_missing.then_some(name))
    .collect();
    if !missing.is_empty() {
        return Err(Stop::usage(format!(
            "without a VM to query, {} must be given, too; or give the VM's QMP socket",
            missing.join(" and ")
        )));
    }
    if stated.max_bandwidth_bytes.is_some() {
        return Err(Stop::usage("--max-bandwidth replaces a VM's setting: without a VM, use --bandwidth"));
    }
    if stated.to_send_bytes.is_some() && stated.ram_bytes.is_none() {
        return Err(Stop::usage("--to-send is a part of RAM: give --ram, too"));
    }
    Ok(stated.plan())
}

impl Figures {
    /// The values of the command line, with defaults.
    pub fn stated(&self) -> Stated {
        Stated {
            bandwidth_bytes: self.bandwidth,
            max_bandwidth_bytes: self.max_bandwidth,
            dirty_bytes: self.dirty_rate,
            sync: self.sync,
            downtime_limit: self.downtime_limit,
            ram_bytes: self.ram,
            to_send_bytes: self.to_send,
            fixed: self.fixed,
            uncertainty: f64::from(self.uncertainty) / 100.0,
            intervals: match self.intervals.is_empty() {
                true => survey::INTERVALS.to_vec(),
                false => self.intervals.clone(),
            },
            to: self.to.clone(),
            postcopy_after: self.postcopy_after,
            postcopy_after_rounds: self.postcopy_after_rounds,
        }
    }
}
