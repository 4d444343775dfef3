//! Compares forecasts with the migrations that follow.

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use sterna_benches::Failure;
use sterna_benches::machines::Lab;
use sterna_benches::peer::Peer;

use crate::record::Record;
use crate::tide::{Load, Pair};
use crate::{Args, pages_per_second};

/// Name under which forecasts are stored.
const NAME: &str = "forecast";
const PATTERNS: [&str; 4] = ["sequential", "random", "hot-set", "mixed"];
/// Pages written per second, in percent of the pages that the link carries.
const RATES: [u64; 5] = [20, 50, 75, 150, 400];
/// Below this rate, in percent, a forecast must be convergent.
const SURE_PERCENT: u64 = 80;
const LIMIT_MS: u64 = 300;
/// A forecast downtime with at most this error, in ms, counts as right. This applies however short the
/// downtime is.
const NEAR_MS: f64 = 5.0;
const PATIENCE: Duration = Duration::from_secs(60);
/// Intervals over which the guest's writes are measured before the migration.
const INTERVALS: &str = "--intervals=50ms,200ms,800ms";

pub fn all(lab: &Lab, args: &Args, record: &mut Record) -> Result<Value, Failure> {
    let bandwidth = usual_bandwidth(lab, args)?;
    println!(
        "link of {} MB/s, of which an idle guest's migration moves {:.0}; {} MiB, limit {LIMIT_MS} ms",
        args.link,
        bandwidth as f64 / 1e6,
        args.ram
    );
    println!(
        "pattern | rate, % of the link | foretold: ends, total s, pause ms | came: total s, pause ms | off by %, %"
    );
    let mut rows = Vec::new();
    for pattern in PATTERNS {
        for percent in RATES {
            let (pair, foretold) = foretell(lab, args, pattern, percent, bandwidth)?;
            let forecast = json!({ "pattern": pattern, "percent": percent, "forecast": foretold });
            rows.push(forecast);
            record.put(NAME, rows.clone().into())?;
            if let Some(row) = rows.last_mut() {
                come_true(pair, row)?;
            }
        }
    }
    let good = |name: &str| rows.iter().filter(|row| row[name] == true).count();
    println!("verdict right: {} of {}", good("verdict_right"), rows.len());
    let sure: Vec<&Value> = rows
        .iter()
        .filter(|row| row["percent"].as_u64().is_some_and(|percent| percent < SURE_PERCENT))
        .collect();
    println!(
        "below {SURE_PERCENT} % called convergent: {} of {}",
        sure.iter().filter(|row| gist(&row["forecast"]).0).count(),
        sure.len()
    );
    println!(
        "of {} that ended: total time within 20 %: {}; downtime within 20 % or {NEAR_MS} ms: {}, or inside the stated range: {}",
        rows.iter().filter(|row| row["ended"] == true).count(),
        good("total_within"),
        good("pause_within"),
        good("pause_explained")
    );
    Ok(rows.into())
}

/// Starts a guest that writes, and makes the forecast. Its migration is not started.
fn foretell(
    lab: &Lab,
    args: &Args,
    pattern: &'static str,
    percent: u64,
    bandwidth: u64,
) -> Result<(Pair, Value), Failure> {
    let rate = pages_per_second(args, percent);
    let load = Load { process: true, pattern, rate, ram_mib: args.ram, working_set_mib: args.ram };
    let mut pair = Pair::new(lab, load)?;
    // The guest first sweeps for a while, so that its writes during the forecast are representative.
    std::thread::sleep(Duration::from_millis(500));
    let parameters = json!({
        "max-bandwidth": 0, "downtime-limit": LIMIT_MS, "multifd-channels": 2, "x-sterna-non-convergence": "fail",
    });
    pair.set(&parameters, &["multifd"])?;
    let foretold = of(lab, &pair.source, bandwidth)?;
    let (ends, total, pause) = gist(&foretold);
    print!(
        "{pattern:<10} | {percent:>3} | {} {:.2} {:.0} | ",
        if ends { "yes" } else { "no" },
        total.unwrap_or(f64::NAN),
        pause.unwrap_or(f64::NAN) * 1e3
    );
    std::io::stdout().flush().map_err(|error| format!("standard output: {error}"))?;
    Ok((pair, foretold))
}

/// Migrates, and adds the result to the forecast's row.
fn come_true(mut pair: Pair, row: &mut Value) -> Result<(), Failure> {
    let (ends, total, pause) = gist(&row["forecast"]);
    let came = pair.migrate_if_it_converges(PATIENCE)?;
    row["ended"] = came.is_some().into();
    row["verdict_right"] = (came.is_some() == ends).into();
    let Some((_, took)) = came else {
        println!("it did not end");
        return Ok(());
    };
    let guest = pair.pause_of_the_guest()?;
    let off = |expected: Option<f64>, was: f64| {
        expected.map_or(f64::NAN, |expected| (expected / was - 1.0) * 100.0)
    };
    let (total_off, pause_off) = (off(total, took), off(pause, guest));
    let range = |end: &str| row["forecast"]["downtime"][end].as_f64().unwrap_or(f64::NAN) * 1e3;
    println!(
        "{took:.2} {:.0} | {total_off:+.0}, {pause_off:+.0} (stated {:.0} to {:.0} ms)",
        guest * 1e3,
        range("low"),
        range("high")
    );
    row["seconds"] = took.into();
    row["pause_of_the_guest"] = guest.into();
    row["total_within"] = (total_off.abs() <= 20.0).into();
    let near = pause.is_some_and(|expected| (expected - guest).abs() * 1e3 <= NEAR_MS);
    let within = pause_off.abs() <= 20.0 || near;
    row["pause_within"] = within.into();
    row["pause_explained"] = (within || in_range(&row["forecast"]["downtime"], guest)).into();
    Ok(())
}

/// From a forecast: whether the migration ends, and the expected total time and downtime in seconds.
fn gist(forecast: &Value) -> (bool, Option<f64>, Option<f64>) {
    let expected = |name: &str| forecast[name]["expected"].as_f64();
    (forecast["convergent"] == true, expected("total_time"), expected("downtime"))
}

/// Whether a forecast's range, which may be open at either end, contains the measured value.
fn in_range(range: &Value, came: f64) -> bool {
    let low = range["low"].as_f64().unwrap_or(0.0);
    let high = range["high"].as_f64().unwrap_or(f64::INFINITY);
    (low..=high).contains(&came)
}

/// The output of `sterna plan` for the guest in `peer`.
pub fn of(lab: &Lab, peer: &Peer, bandwidth: u64) -> Result<Value, Failure> {
    let socket = peer.directory().join("qmp");
    let mut plan = Command::new(&lab.sterna);
    plan.arg("plan").arg(socket).args(["--json", INTERVALS]).arg(format!("--bandwidth={bandwidth}B/s"));
    let said = plan.output().map_err(|error| format!("sterna plan: {error}"))?;
    if !said.status.success() {
        return Err(format!("sterna plan: {}", String::from_utf8_lossy(&said.stderr).trim()));
    }
    let plan: Value =
        serde_json::from_slice(&said.stdout).map_err(|error| format!("sterna plan: {error}"))?;
    Ok(plan["forecast"].clone())
}

/// Bandwidth of an idle guest's migration on this link, in bytes per second. Operators know this value of
/// their networks.
pub fn usual_bandwidth(lab: &Lab, args: &Args) -> Result<u64, Failure> {
    let load = Load { process: true, pattern: "idle", rate: 0, ram_mib: args.ram, working_set_mib: args.ram };
    let mut pair = Pair::new(lab, load)?;
    pair.set(&json!({"max-bandwidth": 0, "multifd-channels": 2}), &["multifd"])?;
    pair.migrate(PATIENCE)?;
    pair.statistics()?["bandwidth_bytes"]
        .as_u64()
        .filter(|rate| *rate > 0)
        .ok_or_else(|| "no bandwidth measured".to_owned())
}
