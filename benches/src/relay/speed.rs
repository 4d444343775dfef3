//! The time and the CPU time of a migration through relays, beside a direct one.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use sterna_benches::Failure;
use sterna_benches::goal::{Bound, Goal};
use sterna_benches::link::Link;
use sterna_benches::machines::Lab;
use sterna_interop::certificates;
use tempfile::TempDir;

use crate::pair::{Pair, relays};
use crate::{Args, median};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Direct,
    Relays,
    Tls,
}

const WAYS: [Way; 3] = [Way::Direct, Way::Relays, Way::Tls];

impl Way {
    fn word(self) -> &'static str {
        match self {
            Way::Direct => "direct",
            Way::Relays => "two relays",
            Way::Tls => "two relays, TLS",
        }
    }
}

#[derive(Debug, Clone, Default)]
struct Sample {
    seconds: f64,
    downtime_ms: f64,
    /// Megabits per second over the whole migration, as QEMU reports them.
    mbps: f64,
    /// CPU seconds of both relays per GB that QEMU sent.
    cpu: f64,
}

pub(crate) fn measure(args: &Args) -> Result<Vec<Goal>, Failure> {
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    certificates::make(directory.path())?;
    println!(
        "| link, MB/s | way | s | downtime, ms | QEMU's mbps | CPU s/GB of both relays |\n| --- | --- | --- | --- | --- | --- |"
    );
    let mut goals = Vec::new();
    for &rate in &args.link {
        let link = (rate > 0).then(|| Link::new(rate)).transpose()?;
        let lab = args.lab(link.as_ref().map(Link::name))?;
        let mut samples = WAYS.map(|_| Vec::new());
        for _ in 0..args.runs.max(1) {
            for (way, samples) in WAYS.into_iter().zip(&mut samples) {
                samples.push(
                    once(&lab, way, args.ram << 20, &directory)
                        .map_err(|why| format!("{}: {why}", way.word()))?,
                );
            }
        }
        for (way, samples) in WAYS.into_iter().zip(&samples) {
            let of = |figure: fn(&Sample) -> f64| median(samples.iter().map(figure));
            println!(
                "| {rate} | {} | {:.2} | {:.0} | {:.0} | {:.2} |",
                way.word(),
                of(|one| one.seconds),
                of(|one| one.downtime_ms),
                of(|one| one.mbps),
                of(|one| one.cpu)
            );
        }
        goals.extend(compare(rate, &samples));
    }
    Ok(goals)
}

/// The goals are for the link with a limit.
fn compare(rate: u64, samples: &[Vec<Sample>; 3]) -> Vec<Goal> {
    let bound = |bound| if rate > 0 { bound } else { Bound::Stated };
    let place =
        if rate > 0 { format!("over {rate} MB/s") } else { "over loopback without a limit".to_owned() };
    let pairs = |of: fn(&Sample) -> f64, join: fn(f64, f64) -> f64, way: usize| {
        median(samples[way].iter().zip(&samples[0]).map(|(one, direct)| join(of(one), of(direct))))
    };
    let mut goals = Vec::new();
    for (way, slower, cpu) in [(1, 1.03, 0.8), (2, 1.05, 1.6)] {
        let name = WAYS[way].word();
        let ratio = pairs(|one| one.seconds, |one, direct| one / direct, way);
        goals.push(Goal::of(
            &format!("{name} {place}: time against direct"),
            ratio,
            "",
            bound(Bound::AtMost(slower)),
        ));
        let later = pairs(|one| one.downtime_ms, |one, direct| one - direct, way);
        goals.push(Goal::of(
            &format!("{name} {place}: more downtime, ms"),
            later,
            "",
            bound(Bound::AtMost(10.0)),
        ));
        let estimate = pairs(|one| one.mbps, |one, direct| (one / direct - 1.0).abs(), way);
        goals.push(Goal::of(
            &format!("{name} {place}: QEMU's mbps differs by"),
            estimate,
            "",
            bound(Bound::AtMost(0.1)),
        ));
        let spent = median(samples[way].iter().map(|one| one.cpu));
        goals.push(Goal::of(&format!("{name} {place}: CPU s/GB of both"), spent, "", Bound::AtMost(cpu)));
    }
    goals
}

fn once(lab: &Lab, way: Way, bytes: u64, certificates: &TempDir) -> Result<Sample, Failure> {
    let mut pair = Pair::begin(lab, bytes)?;
    let (address, both) = match way {
        Way::Direct => (pair.destination.listen()?, None),
        Way::Relays | Way::Tls => {
            let target = pair.listen_on_unix()?;
            let tls = |endpoint: &str| tls_arguments(certificates.path(), endpoint);
            let more =
                if way == Way::Tls { (tls("client"), tls("server")) } else { (Vec::new(), Vec::new()) };
            let place = pair.source.directory().to_owned();
            let both = relays(lab, &place, &target, (&more.0, &more.1), |address| Ok(address.to_owned()))?;
            (both.0.address.clone(), Some(both))
        }
    };
    let spent = || both.as_ref().map_or(Duration::ZERO, |both| both.0.cpu() + both.1.cpu());
    pair.run()?;
    let before = spent();
    let took = pair.migrate(&address)?;
    let spent = spent().saturating_sub(before);
    let query = pair.source.execute("query-migrate", Value::Null)?;
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    pair.destination.wait_for_ticks(2)?;
    Ok(Sample {
        seconds: took.as_secs_f64(),
        downtime_ms: number(&query["downtime"]),
        mbps: number(&query["ram"]["mbps"]),
        cpu: spent.as_secs_f64() / (number(&query["ram"]["transferred"]) / 1e9),
    })
}

fn tls_arguments(directory: &Path, endpoint: &str) -> Vec<String> {
    let mut arguments = vec!["--tls-dir".to_owned(), directory.display().to_string()];
    if endpoint == "client" {
        arguments.extend(["--tls-hostname".to_owned(), "localhost".to_owned()]);
    }
    arguments
}
