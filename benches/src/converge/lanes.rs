//! Measures the idle time of lanes because of syncs. The guest writes at full speed.
//!
//! Lanes cannot send more than the guest writes. If the guest writes less than the lanes can carry, rounds
//! shrink to the length of a sync. The rest is idle time. The guest's share of the lanes' capacity is
//! therefore printed as well.

use std::time::Duration;

use serde_json::{Value, json};
use sterna_benches::Failure;
use sterna_benches::machines::Lab;

use crate::tide::{Load, Pair};
use crate::{Args, median};

const REPETITIONS: usize = 7;
/// Duration of the rounds. The downtime limit is 0, so the migration does not end earlier.
const ROUNDS: Duration = Duration::from_secs(2);

pub fn all(lab: &Lab, args: &Args) -> Result<Value, Failure> {
    let load = Load {
        process: true,
        pattern: "random",
        rate: 0,
        ram_mib: args.ram * 4,
        working_set_mib: args.ram * 4,
    };
    println!(
        "rounds | idle % of all time, of a round: median and worst | the guest writes, % of what lanes carry | \
         sync ms, median | spread of bandwidth readings, ± %"
    );
    let mut found = Vec::new();
    let mut pair = Pair::new(lab, load)?;
    for _ in 0..REPETITIONS {
        let parameters = json!({"max-bandwidth": 0, "downtime-limit": 0, "multifd-channels": 2});
        pair.set(&parameters, &["multifd"])?;
        let readings = pair.migrate_without_end(ROUNDS, Duration::from_secs(60))?;
        let record = &readings.statistics;
        let rounds = record["rounds"].as_array().cloned().unwrap_or_default();
        let rounds: Vec<&Value> = rounds.iter().filter(|round| round["stopped"] == false).collect();
        let idle: Vec<f64> = rounds
            .iter()
            .map(|round| seconds(&round["lanes"]["idle"]) / seconds(&round["took"]).max(1e-9) * 100.0)
            .collect();
        let sync: Vec<f64> = rounds.iter().map(|round| seconds(&round["sync"]) * 1e3).collect();
        let middle = median(&readings.megabits);
        let spread =
            readings.megabits.iter().map(|read| (read / middle - 1.0).abs() * 100.0).fold(0.0, f64::max);
        let written = readings.written_bytes / record["drain_bytes"].as_f64().unwrap_or(f64::NAN) * 100.0;
        println!(
            "{:>6} | {:.2} {:>5.2} {:>5.2} | {written:.0} | {:>6.3} | {spread:.1} ({} readings, median {middle:.0} Mbit/s)",
            rounds.len(),
            sum(&rounds, |round| seconds(&round["lanes"]["idle"]))
                / sum(&rounds, |round| seconds(&round["took"]))
                * 100.0,
            median(&idle),
            idle.iter().copied().fold(0.0, f64::max),
            median(&sync),
            readings.megabits.len(),
        );
        found.push(json!({
            "idle_percent": idle, "written_percent": written, "sync_ms": sync, "mbps": readings.megabits,
        }));
        pair = pair.again(lab, load)?;
    }
    Ok(found.into())
}

fn sum(rounds: &[&Value], time: impl Fn(&Value) -> f64) -> f64 {
    rounds.iter().map(|round| time(round)).sum()
}

/// Reads a duration from the engine's statistics.
fn seconds(time: &Value) -> f64 {
    let parts = time["secs"].as_f64().zip(time["nanos"].as_f64());
    parts.map_or_else(|| time.as_f64().unwrap_or(0.0), |(whole, nanos)| whole + nanos / 1e9)
}
