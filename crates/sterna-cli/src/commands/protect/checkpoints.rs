//! Options that control when a Sterna VM takes checkpoints. A QEMU has none of them.

use serde_json::{Map, Value};

use crate::units;

/// When checkpoints are taken. What is not given stays as the VM has it.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Options for the checkpoints of a Sterna VM")]
pub struct Checkpoints {
    /// When to take a checkpoint: at the interval (interval), when output waits (output), or so often that the guest is
    /// paused for a given share of the time (load)
    #[arg(long, value_name = "MODE", value_parser = ["interval", "output", "load"])]
    pub checkpoint_mode: Option<String>,
    /// With --checkpoint-mode output: time in milliseconds that output waits before a checkpoint is taken for it
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=3_600_000))]
    pub output_delay: Option<u32>,
    /// With --checkpoint-mode load: percentage of the time for which the guest may be paused
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=90))]
    pub checkpoint_overhead: Option<u8>,
    /// Number of checkpoints that may be on their way to the standby
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=4))]
    pub in_flight: Option<u8>,
    /// How dirty pages are copied: while the guest is paused (copy), or after it has resumed, write-protected until
    /// then (copy-on-write); auto: the faster of the two
    #[arg(long, value_name = "WAY", value_parser = ["auto", "copy", "copy-on-write"])]
    pub checkpoint_copy: Option<String>,
    /// Send only the differences from the standby's copy of a page (xbzrle). SIZE: limit of the memory for old pages, a
    /// power of two
    #[arg(long, value_name = "SIZE", num_args = 0..=1, default_missing_value = "64M", value_parser = units::parse_size)]
    pub delta: Option<u64>,
}

impl Checkpoints {
    /// For each given option: its name, the parameter that it sets, and the value.
    fn given(&self) -> Vec<(&'static str, &'static str, Value)> {
        let all = [
            ("--checkpoint-mode", "x-sterna-checkpoint-mode", self.checkpoint_mode.clone().map(Value::from)),
            ("--output-delay", "x-sterna-output-delay", self.output_delay.map(Value::from)),
            (
                "--checkpoint-overhead",
                "x-sterna-checkpoint-overhead",
                self.checkpoint_overhead.map(Value::from),
            ),
            ("--in-flight", "x-sterna-checkpoints-in-flight", self.in_flight.map(Value::from)),
            ("--checkpoint-copy", "x-sterna-checkpoint-copy", self.checkpoint_copy.clone().map(Value::from)),
            ("--delta", "xbzrle-cache-size", self.delta.map(Value::from)),
        ];
        all.into_iter().filter_map(|(option, name, value)| Some((option, name, value?))).collect()
    }

    /// The name of one given option, for an error message.
    pub fn first(&self) -> Option<&'static str> {
        self.given().first().map(|(option, ..)| *option)
    }

    /// The migration parameters that the given options set.
    pub fn parameters(&self) -> Map<String, Value> {
        self.given().into_iter().map(|(_, name, value)| (name.to_owned(), value)).collect()
    }
}
