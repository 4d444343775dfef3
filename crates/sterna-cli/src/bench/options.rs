//! Options of `sterna bench`.

use std::path::PathBuf;

use crate::units;

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
pub(super) fn rate_or_none(text: &str) -> Result<u64, String> {
    if text == "0" { Ok(0) } else { units::parse_rate(text) }
}
