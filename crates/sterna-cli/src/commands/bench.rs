//! `sterna bench`: measures the cost of a migration on this host.

use crate::bench::options::Downtime;
use crate::bench::{self, downtime};
use crate::exit::{Done, Stop};
use crate::terminal;

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
