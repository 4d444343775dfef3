//! Compares the downtime that the guest measured with the limit. It runs many migrations with a convergent
//! forecast.

use std::time::Duration;

use serde_json::{Value, json};
use sterna_benches::Failure;
use sterna_benches::machines::Lab;

use crate::forecast;
use crate::tide::{Load, Pair};
use crate::{Args, median, pages_per_second, quantile};

/// Number of migrations with one forecast. The guest's writes do not change between them.
const FORECAST_EVERY: usize = 20;
/// Time for which the guest's actual write rate is measured.
const MEASURED: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(60);

pub fn all(lab: &Lab, args: &Args) -> Result<Value, Failure> {
    let load = load(lab, args);
    println!(
        "{} machine of {} MiB, {} MiB of them written at random at {} pages/s, {} % of a link of {} MB/s",
        if load.process { "process" } else { "KVM" },
        load.ram_mib,
        load.working_set_mib,
        load.rate,
        args.rate,
        args.link
    );
    println!(
        "limit ms | migrations | without end | foretold | kept | median ms | p99 ms | most ms | source says, median ms | \
         the guest writes, % of the link"
    );
    let mut rows = Vec::new();
    for &limit in &args.limits {
        rows.push(one(lab, args, load, limit)?);
    }
    Ok(rows.into())
}

fn load(lab: &Lab, args: &Args) -> Load {
    Load {
        process: !lab.kvm,
        pattern: "random",
        rate: pages_per_second(args, args.rate),
        ram_mib: args.ram / 2,
        working_set_mib: args.ram / 4,
    }
}

fn one(lab: &Lab, args: &Args, load: Load, limit: u64) -> Result<Value, Failure> {
    let bandwidth = forecast::usual_bandwidth(lab, args)?;
    let mut pair = Pair::new(lab, load)?;
    let (mut guest, mut source) = (Vec::new(), Vec::new());
    let written_percent = pair.written_bytes_per_second(MEASURED)? / (args.link as f64 * 1e4);
    // A migration that was forecast to end, but does not, also counts as a missed limit.
    let (mut foretold, mut endless, mut is_foretold) = (0, 0, false);
    for run in 0..args.runs {
        std::thread::sleep(Duration::from_millis(100));
        let parameters = json!({"max-bandwidth": 0, "downtime-limit": limit, "multifd-channels": 2});
        pair.set(&parameters, &["multifd"])?;
        if run % FORECAST_EVERY == 0 {
            is_foretold = forecast::of(lab, &pair.source, bandwidth)?["convergent"] == true;
        }
        foretold += usize::from(is_foretold);
        let Some((said, _)) = pair.migrate_if_it_converges(PATIENCE)? else {
            endless += 1;
            pair = Pair::new(lab, load)?;
            continue;
        };
        let pause = pair.pause_of_the_guest()? * 1e3;
        if is_foretold {
            guest.push(pause);
            source.push(said["downtime"].as_f64().unwrap_or(f64::NAN));
        }
        pair = pair.again(lab, load)?;
    }
    let kept = guest.iter().filter(|pause| **pause <= limit as f64).count();
    println!(
        "{limit:>8} | {:>10} | {endless:>11} | {foretold:>8} | {:>3.1} % | {:>9.1} | {:>6.1} | {:>7.1} | {:>22.0} | {written_percent:.0}",
        args.runs,
        kept as f64 / foretold.max(1) as f64 * 100.0,
        median(&guest),
        quantile(&guest, 0.99),
        quantile(&guest, 1.0),
        median(&source),
    );
    Ok(json!({
        "limit_ms": limit, "ram_mib": load.ram_mib, "working_set_mib": load.working_set_mib, "link_mb": args.link,
        "rate_percent": args.rate, "written_percent": written_percent, "migrations": args.runs,
        "endless": endless, "foretold": foretold, "kept": kept, "guest_ms": guest, "source_ms": source,
    }))
}
