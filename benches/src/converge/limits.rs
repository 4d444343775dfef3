//! The pause that the guest saw, against the limit, over many migrations that were foretold to converge.

use std::time::Duration;

use serde_json::{Value, json};
use sterna_benches::Failure;
use sterna_benches::machines::Lab;

use crate::forecast;
use crate::tide::{Load, Pair};
use crate::{Args, median, quantile};

/// A new forecast after so many migrations: the guest does what it did.
const FORECAST_EVERY: usize = 20;
const PATIENCE: Duration = Duration::from_secs(60);

pub fn all(lab: &Lab, args: &Args) -> Result<Value, Failure> {
    println!(
        "limit ms | migrations | foretold | kept | median ms | p99 ms | most ms | source says, median ms"
    );
    let mut rows = Vec::new();
    for &limit in &args.limits {
        rows.push(one(lab, args, limit)?);
    }
    Ok(rows.into())
}

fn one(lab: &Lab, args: &Args, limit: u64) -> Result<Value, Failure> {
    let load = Load {
        process: !lab.kvm,
        pattern: "random",
        rate: 6_000,
        ram_mib: args.ram / 2,
        working_set_mib: args.ram / 4,
    };
    let bandwidth = forecast::usual_bandwidth(lab, args)?;
    let mut pair = Pair::new(lab, load)?;
    let (mut guest, mut source) = (Vec::new(), Vec::new());
    let (mut foretold, mut is_foretold) = (0, false);
    for run in 0..args.runs {
        std::thread::sleep(Duration::from_millis(100));
        let parameters = json!({"max-bandwidth": 0, "downtime-limit": limit, "multifd-channels": 2});
        pair.set(&parameters, &["multifd"])?;
        if run % FORECAST_EVERY == 0 {
            is_foretold = forecast::of(lab, &pair.source, bandwidth)?["convergent"] == true;
        }
        let (said, _) = pair.migrate(PATIENCE)?;
        let pause = pair.pause_of_the_guest()? * 1e3;
        if is_foretold {
            foretold += 1;
            guest.push(pause);
            source.push(said["downtime"].as_f64().unwrap_or(f64::NAN));
        }
        pair = pair.again(lab, load)?;
    }
    let kept = guest.iter().filter(|pause| **pause <= limit as f64).count();
    println!(
        "{limit:>8} | {:>10} | {foretold:>8} | {:>3.1} % | {:>9.1} | {:>6.1} | {:>7.1} | {:.0}",
        args.runs,
        kept as f64 / guest.len().max(1) as f64 * 100.0,
        median(&guest),
        quantile(&guest, 0.99),
        quantile(&guest, 1.0),
        median(&source),
    );
    Ok(
        json!({ "limit_ms": limit, "foretold": foretold, "kept": kept, "guest_ms": guest, "source_ms": source }),
    )
}
