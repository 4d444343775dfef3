//! Compares postcopy's rate with precopy's on the same path.

use std::time::{Duration, Instant};

use sterna::Parameters;
use sterna_benches::Failure;
use sterna_benches::goal::{Bound, Goal};
use sterna_link::{Direction, Link, Shape};

use crate::Args;
use crate::guest::{Travel, said};

pub const HEAD: &str = "| congestion control | round trip, ms | jitter, ms | precopy, MB/s | postcopy, MB/s | its slowest 5 s, MB/s | postcopy / precopy |\n\
                        | --- | --- | --- | --- | --- | --- | --- |";

/// Warm-up, which does not count, and measured time of precopy.
const PRECOPY: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(8)];
const STRETCH: Duration = Duration::from_secs(5);
const WANTED: f64 = 0.9;

pub fn rows(args: &Args) -> impl Iterator<Item = Result<(String, Goal), Failure>> {
    let paths = args.control.iter().flat_map(move |control| {
        let of_trip = move |trip: &f64| args.jitter.iter().map(|jitter| (*trip, *jitter)).collect::<Vec<_>>();
        args.round_trip.iter().flat_map(of_trip).map(move |(trip, jitter)| (control, trip, jitter))
    });
    paths.map(|(control, trip, jitter)| {
        row(args, control, trip, jitter)
            .map_err(|why| format!("{control}, {trip} ms, jitter {jitter} ms: {why}"))
    })
}

fn row(args: &Args, control: &str, trip: f64, jitter: f64) -> Result<(String, Goal), Failure> {
    let milliseconds = |value: f64| Duration::from_secs_f64(value / 1e3);
    let shape = Shape {
        bytes_per_second: args.rate * 1_000_000,
        queue: Duration::from_millis(50),
        delay: milliseconds(trip / 2.0),
        jitter: milliseconds(jitter),
        ..Shape::default()
    };
    let link = Link::new(shape, args.seed)?;
    for host in [link.near(), link.far()] {
        host.use_congestion_control(control).map_err(said)?;
    }
    let needed = args.seconds + PRECOPY.iter().sum::<Duration>().as_secs() + 2;
    let ram_bytes = (args.rate * 1_000_000 * needed).next_multiple_of(2 << 20);
    let parameters = Parameters { max_bandwidth_bytes: 0, ..Parameters::default() };
    let travel = Travel::begin(&link, ram_bytes, &parameters)?;

    std::thread::sleep(PRECOPY[0]);
    let precopy = carried(&link, PRECOPY[1], &|| false);
    travel.migration.start_postcopy().map_err(said)?;
    std::thread::sleep(Duration::from_secs(1));
    let is_over = || travel.migration.outcome().is_some();
    let (began, mut stretches) = (Instant::now(), Vec::new());
    while began.elapsed() < Duration::from_secs(args.seconds) && !is_over() {
        stretches.push(carried(&link, STRETCH, &is_over));
    }
    // The migration may have ended within the last stretch.
    if is_over() {
        stretches.pop();
    }
    let postcopy = stretches.iter().sum::<f64>() / stretches.len() as f64;
    let slowest = stretches.iter().copied().fold(f64::INFINITY, f64::min);
    // The rest of RAM is sent without a limit of the link's rate.
    link.set_both(Shape { bytes_per_second: 0, ..shape });
    travel.end()?;
    let share = postcopy / precopy;
    let text = format!(
        "| {control} | {trip} | {jitter} | {precopy:.1} | {postcopy:.1} | {slowest:.1} | {share:.2} |"
    );
    let what = format!("postcopy's rate / precopy's: {control}, {trip} ms, jitter {jitter} ms");
    let beside = format!("{postcopy:.1} of {precopy:.1} MB/s");
    Ok((text, Goal::of(&what, share, &beside, Bound::AtLeast(WANTED))))
}

/// MB/s over `time`, or until the migration is over.
fn carried(link: &Link, time: Duration, is_over: &dyn Fn() -> bool) -> f64 {
    let (began, before) = (Instant::now(), link.delivered_bytes(Direction::There));
    while began.elapsed() < time && !is_over() {
        std::thread::sleep(Duration::from_millis(10));
    }
    (link.delivered_bytes(Direction::There) - before) as f64 / began.elapsed().as_secs_f64() / 1e6
}
