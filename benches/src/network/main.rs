//! Measures how networks affect a migration: the rate of postcopy's pages on a path with jitter, and the
//! delay until pages are sent again after an outage.
//!
//! - Source and destination are threads of this program, each in a network namespace of its own. Packets pass
//!   a link of a known rate, delay and jitter ([`sterna_link`]).
//! - **Pace**: precopy runs for some seconds, then postcopy for a minute. Both rates are bytes of packets
//!   that the link has delivered. The first two seconds after the start do not count.
//! - **Cuts**: the link delivers nothing for some seconds. The result is the time from its return until it
//!   has delivered as many bytes as it carries in a tenth of a second.
#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

mod cut;
mod guest;
mod pace;

use std::path::PathBuf;

use clap::Parser;
use sterna_benches::Failure;
use sterna_benches::goal::{self, Goal};
use sterna_benches::markdown::{self, Measured};

/// Measures migrations over networks with jitter and outages.
#[derive(Parser)]
struct Args {
    /// The link's rate, MB/s.
    #[arg(long, default_value_t = 40)]
    rate: u64,
    /// Time for which postcopy is measured, seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Jitter of each direction, ms.
    #[arg(long, value_delimiter = ',', default_value = "0,1,5")]
    jitter: Vec<f64>,
    /// Round-trip times, ms.
    #[arg(long, value_delimiter = ',', default_value = "0.2,2,20")]
    round_trip: Vec<f64>,
    /// TCP congestion controls that both hosts use, one run each.
    #[arg(long, value_delimiter = ',', default_value = "reno,bbr")]
    control: Vec<String>,
    /// Lengths of outages, seconds.
    #[arg(long, value_delimiter = ',', default_value = "1,1.6,3,8,15,30")]
    cut: Vec<f64>,
    /// Skip one part: pace or cuts.
    #[arg(long, value_name = "PART")]
    without: Option<String>,
    /// Seed of the link's jitter.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write goals and rows to this file, in the form of `benches/RESULTS.md`.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

fn main() -> std::process::ExitCode {
    sterna_benches::exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Failure> {
    let wants = |part: &str| args.without.as_deref() != Some(part);
    let (mut goals, mut lines) = (Vec::new(), String::new());
    if wants("pace") {
        lines += &table(pace::HEAD, pace::rows(args), &mut goals)?;
    }
    if wants("cuts") {
        lines += &table(cut::HEAD, cut::rows(args), &mut goals)?;
    }
    let goals = goal::table(&goals);
    println!("\n{goals}");
    if let Some(file) = &args.markdown {
        let text = markdown::document(&Measured::now("network"), &format!("{goals}\n{lines}"));
        std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}

/// Prints each row when it is measured.
fn table(
    head: &str,
    rows: impl Iterator<Item = Result<(String, Goal), Failure>>,
    goals: &mut Vec<Goal>,
) -> Result<String, Failure> {
    println!("{head}");
    let mut text = format!("{head}\n");
    for row in rows {
        let (line, goal) = row?;
        println!("{line}");
        text += &format!("{line}\n");
        goals.push(goal);
    }
    println!();
    Ok(text + "\n")
}
