//! Measures the data that is sent again after an outage of some seconds. The precopy survives the outage with
//! `x-sterna-reconnect-window`.
//!
//! - The guest is threads in two VMs of `sterna run`. All of its RAM is random bytes, and it writes random
//!   pages at a known rate.
//! - All connections pass a network that can be cut. After a given share of RAM, it closes them and accepts none
//!   for some seconds.
//! - **Sent again** is the source's count of pages that were sent before and had not arrived
//!   ([`sterna::stats::Reconnection`]). The table also shows all bytes that it carried, RAM once, and
//!   the guest's writes since the start of the migration.
//! - At the end, the guest checks all of its memory.
#![allow(clippy::print_stdout, reason = "a bench prints its figures")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::{Value, json};
use sterna::Statistics;
use sterna_benches::forwarder::Forwarder;
use sterna_benches::goal::{Bound, Goal};
use sterna_benches::machines::Lab;
use sterna_benches::markdown::{self, Measured};
use sterna_benches::{Failure, goal};

const PAGE_BYTES: u64 = 4096;
const MIB: f64 = 1048576.0;
/// Limit of data that is sent again, in addition to the pages written meanwhile, MiB.
const AGAIN: f64 = 64.0;
const PATIENCE: Duration = Duration::from_secs(300);

/// Measures the data that is sent again after a cut.
#[derive(Parser)]
struct Args {
    /// RAM of the guests, MiB.
    #[arg(long, default_value_t = 4096)]
    ram: u64,
    /// Times of the cut, in percent of RAM that was sent.
    #[arg(long, value_delimiter = ',', default_value = "10,50,90")]
    at: Vec<u64>,
    /// Length of the outage, seconds.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Multifd channels; 0: only the main channel.
    #[arg(long, value_delimiter = ',', default_value = "0,4")]
    channels: Vec<u64>,
    /// Pages that the guest writes per second.
    #[arg(long, default_value_t = 2000)]
    rate: u64,
    /// `max-bandwidth`, MB/s.
    #[arg(long, default_value_t = 400)]
    bandwidth: u64,
    /// The `sterna` command to measure.
    #[arg(long, default_value = "sterna")]
    sterna: PathBuf,
    /// Write the rows as JSON to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write goals and rows to this file, in the form of `benches/RESULTS.md`.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

struct Row {
    percent: u64,
    channels: u64,
    /// Seconds without a connection.
    away: f64,
    /// Bytes that were sent again, in MiB.
    again: f64,
    written_meanwhile: f64,
    carried: f64,
    ram: f64,
    written: f64,
}

fn main() -> std::process::ExitCode {
    sterna_benches::exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Failure> {
    let lab = Lab { root: None, sterna: args.sterna.clone(), kvm: false, namespace: None };
    let mut rows = Vec::new();
    println!("{HEAD}");
    for &channels in &args.channels {
        for &percent in &args.at {
            let row = once(&lab, args, percent, channels);
            let row = row.map_err(|why| format!("{percent} %, {channels} channels: {why}"))?;
            println!("{}", row.text());
            rows.push(row);
        }
    }
    let goals: Vec<Goal> = rows.iter().map(Row::goal).collect();
    let goals = goal::table(&goals);
    println!("\n{goals}");
    if let Some(file) = &args.json {
        let rows: Vec<Value> = rows.iter().map(Row::value).collect();
        let all = json!({"schema": "sterna-bench-cuts", "version": 1, "rows": rows});
        std::fs::write(file, format!("{all:#}\n")).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    if let Some(file) = &args.markdown {
        let lines: String = rows.iter().map(|row| row.text() + "\n").collect();
        let text = markdown::document(&Measured::now("cuts"), &format!("{goals}\n{HEAD}\n{lines}"));
        std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}

fn once(lab: &Lab, args: &Args, percent: u64, channels: u64) -> Result<Row, Failure> {
    let vm = |more: &[String]| {
        let mut arguments = vec!["--machine=process".to_owned(), format!("--ram={}M", args.ram)];
        arguments.extend_from_slice(more);
        lab.start_tide(arguments)
    };
    let mut source = vm(&["--pattern=random".to_owned(), format!("--rate={}", args.rate)])?;
    let mut destination = vm(&["--incoming=defer".to_owned()])?;
    for peer in [&mut source, &mut destination] {
        let switches = json!([
            {"capability": "events", "state": true},
            {"capability": "return-path", "state": true},
            {"capability": "multifd", "state": channels > 0},
        ]);
        peer.execute("migrate-set-capabilities", json!({ "capabilities": switches }))?;
        let mut parameters =
            json!({"max-bandwidth": args.bandwidth * 1_000_000, "x-sterna-reconnect-window": 60_000});
        if channels > 0 {
            parameters["multifd-channels"] = channels.into();
        }
        peer.execute("migrate-set-parameters", parameters)?;
    }
    let to = destination.listen()?;
    let port = to.rsplit(':').next().and_then(|port| port.parse().ok()).ok_or("no port")?;
    let network = Forwarder::to(port)?;
    let began = Instant::now();
    source.execute("migrate", json!({"uri": network.address()}))?;
    let ram_bytes = args.ram << 20;
    wait_for(|| Ok(network.carried() >= ram_bytes / 100 * percent))?;
    network.cut(Duration::from_secs_f64(args.seconds));
    source.wait_until_over(PATIENCE)?;
    let took = began.elapsed();
    let statistics = source.execute("x-sterna-migration-statistics", Value::Null)?["outgoing"].take();
    let statistics: Statistics =
        serde_json::from_value(statistics).map_err(|error| format!("the statistics: {error}"))?;
    let [lost] = &statistics.reconnections[..] else {
        return Err(format!("{} connections were lost, and not one", statistics.reconnections.len()));
    };
    let verdict = destination.execute("x-sterna-check-guest", Value::Null)?;
    if verdict["consistent"] != true {
        return Err(format!("the guest's memory is wrong: {verdict}"));
    }
    let written = |time: Duration| (args.rate * PAGE_BYTES) as f64 * time.as_secs_f64() / MIB;
    Ok(Row {
        percent,
        channels,
        away: lost.took.as_secs_f64(),
        again: lost.resent_bytes as f64 / MIB,
        written_meanwhile: written(lost.took),
        carried: network.carried() as f64 / MIB,
        ram: ram_bytes as f64 / MIB,
        written: written(took),
    })
}

fn wait_for(mut is_so: impl FnMut() -> Result<bool, Failure>) -> Result<(), Failure> {
    let until = Instant::now() + PATIENCE;
    while !is_so()? {
        if Instant::now() > until {
            return Err("too little was sent".to_owned());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

const HEAD: &str = "| cut at | channels | without a connection, s | sent again, MiB | written meanwhile, MiB | carried in all, MiB | RAM, MiB | written in all, MiB |\n\
                    | --- | --- | --- | --- | --- | --- | --- | --- |";

impl Row {
    fn goal(&self) -> Goal {
        let channels = if self.channels > 0 { format!(", multifd {}", self.channels) } else { String::new() };
        Goal::of(
            &format!(
                "cut at {} %{channels}: sent again beyond what was written meanwhile, MiB",
                self.percent
            ),
            (self.again - self.written_meanwhile).max(0.0),
            &format!("{:.1} sent again", self.again),
            Bound::AtMost(AGAIN),
        )
    }

    fn text(&self) -> String {
        format!(
            "| {} % | {} | {:.1} | {:.1} | {:.0} | {:.0} | {:.0} | {:.0} |",
            self.percent,
            self.channels,
            self.away,
            self.again,
            self.written_meanwhile,
            self.carried,
            self.ram,
            self.written
        )
    }

    fn value(&self) -> Value {
        json!({
            "percent": self.percent,
            "channels": self.channels,
            "away_s": self.away,
            "sent_again_mib": self.again,
            "written_meanwhile_mib": self.written_meanwhile,
            "carried_mib": self.carried,
            "ram_mib": self.ram,
            "written_mib": self.written,
        })
    }
}
