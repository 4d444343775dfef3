//! `sterna bench`: measures the cost of a migration on this host.

use std::path::PathBuf;

use crate::bench::{self, downtime};
use crate::exit::{Done, Stop};
use crate::{terminal, units};

/// Benchmark to run.
#[derive(Debug, Clone, clap::Args)]
pub struct Arguments {
    /// Benchmark
    #[command(subcommand)]
    pub what: What,
}

/// The benchmarks.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum What {
    /// Measure the downtime of VMs whose devices have large state, by number of devices and of multifd channels
    Downtime(Downtime),
}

/// How downtime is measured.
#[derive(Debug, Clone, clap::Args)]
pub struct Downtime {
    /// Limit of the runs of each setting; fewer runs are made if the median is precise enough
    #[arg(long, value_name = "N", default_value_t = 70, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: u32,
    /// Numbers of devices
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,2,4,8", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub devices: Vec<u32>,
    /// Size of each device's state, such as 100M
    #[arg(long, value_name = "SIZE", default_value = "100M", value_parser = units::parse_size)]
    pub state: u64,
    /// Numbers of multifd channels; 0: the main channel, one device after another, as QEMU does
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "0,2,4,6,8,12,15,20,25")]
    pub channels: Vec<u8>,
    /// Rate at which the state of a stopped device is read and loaded, such as 400MB/s; 0: no limit
    #[arg(long, value_name = "RATE", default_value = "400MB/s", value_parser = rate_or_none)]
    pub device_rate: u64,
    /// Percentage of a device's state that can be read while the guest runs
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub precopy: u8,
    /// Limit of the destination's memory for one device's state, such as 16M
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = units::parse_size)]
    pub queue: u64,
    /// Bandwidth limit, such as 1GB/s; 0: no limit
    #[arg(long, value_name = "RATE", default_value = "0", value_parser = rate_or_none)]
    pub max_bandwidth: u64,
    /// Size of the guest's RAM
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = units::parse_ram)]
    pub ram: u64,
    /// Print all runs as JSON instead of tables
    #[arg(long)]
    pub json: bool,
    /// Write a chart of the table
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
}

/// Parses a rate; `0` means no limit.
fn rate_or_none(text: &str) -> Result<u64, String> {
    if text == "0" { Ok(0) } else { units::parse_rate(text) }
}

/// Runs the benchmark and prints its results.
pub fn execute(arguments: &Arguments) -> Done {
    let What::Downtime(arguments) = &arguments.what;
    let interrupts = crate::interrupts::Interrupts::catch()?;
    let results = downtime::measure(arguments, &interrupts)?;
    if let Some(path) = &arguments.svg {
        let text = bench::picture::picture(&results);
        std::fs::write(path, text).map_err(|error| Stop::failed(format!("{}: {error}", path.display())))?;
    }
    terminal::print(&if arguments.json { results.to_json() } else { bench::table::tables(&results) });
    Ok(crate::exit::Status::Done)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::cli::{Cli, Command};
    use crate::commands::bench::What;

    #[test]
    fn downtime_takes_a_rate_and_none() {
        for (text, rate) in [("0", Some(0)), ("400MB/s", Some(400_000_000)), ("400", None)] {
            let line = ["sterna", "bench", "downtime", "--device-rate", text];

            let parsed = Cli::try_parse_from(line).ok().map(|cli| match cli.command {
                Command::Bench(arguments) => {
                    let What::Downtime(arguments) = arguments.what;
                    arguments.device_rate
                }
                other => panic!("{other:?}"),
            });

            assert_eq!(parsed, rate, "{text}");
        }
    }
}
