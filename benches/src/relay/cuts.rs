//! How much longer a migration takes whose network is away for some seconds.

use std::time::{Duration, Instant};

use serde_json::json;
use sterna_benches::Failure;
use sterna_benches::goal::{Bound, Goal};
use sterna_benches::machines::Lab;

use crate::Args;
use crate::pair::{Pair, relays_over_a_network};

/// QEMU's `max-bandwidth`, bytes per second.
const PACE: u64 = 100_000_000;
/// Limit of the time that a cut adds to its own length, seconds.
const MORE: f64 = 2.0;
/// Limit of a migration beside the outage.
const PATIENCE: Duration = Duration::from_secs(300);

pub(crate) fn measure(args: &Args) -> Result<Vec<Goal>, Failure> {
    let lab = args.lab(None)?;
    let whole = once(&lab, args.ram << 20, None)?;
    println!("\n| away, s | s |\n| --- | --- |\n| none | {whole:.2} |");
    let mut goals = Vec::new();
    for &away in &args.cut {
        let took =
            once(&lab, args.ram << 20, Some(away)).map_err(|why| format!("a cut of {away} s: {why}"))?;
        println!("| {away} | {took:.2} |");
        let what = if away > 0.0 {
            format!("a cut of {away} s")
        } else {
            "one of two connections is lost".to_owned()
        };
        goals.push(Goal::of(
            &format!("{what} in precopy: seconds beyond the cut"),
            (took - whole - away).max(0.0),
            &format!("{took:.2} s, {whole:.2} without"),
            Bound::AtMost(MORE),
        ));
    }
    Ok(goals)
}

/// Seconds of a migration that is cut when a third of RAM was sent.
fn once(lab: &Lab, bytes: u64, away: Option<f64>) -> Result<f64, Failure> {
    let mut pair = Pair::begin(lab, bytes)?;
    let target = pair.listen_on_unix()?;
    let place = pair.source.directory().to_owned();
    let (source, network, destination) = relays_over_a_network(lab, &place, &target, 600)?;
    pair.source.execute("migrate-set-parameters", json!({ "max-bandwidth": PACE }))?;
    pair.run()?;
    let began = Instant::now();
    pair.source.execute("migrate", json!({ "uri": source.address }))?;
    if let Some(away) = away {
        while network.carried() < bytes / 3 {
            if began.elapsed() > PATIENCE {
                return Err("too little was sent".to_owned());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        if away > 0.0 { network.cut(Duration::from_secs_f64(away)) } else { network.cut_one() }
    }
    let limit = PATIENCE + Duration::from_secs_f64(away.unwrap_or(0.0));
    let said = || format!("source: {}destination: {}", source.said(), destination.said());
    pair.source.wait_until_over(limit).map_err(|why| format!("{why}\n{}", said()))?;
    pair.destination.wait_until_over(limit).map_err(|why| format!("{why}\n{}", said()))?;
    let took = began.elapsed().as_secs_f64();
    pair.destination.wait_for_ticks(2)?;
    Ok(took)
}
