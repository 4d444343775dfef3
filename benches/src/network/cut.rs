//! Measures how soon pages are sent again after an outage of the network.

use std::time::{Duration, Instant};

use sterna::Parameters;
use sterna_benches::Failure;
use sterna_benches::goal::{Bound, Goal};
use sterna_link::{Direction, Link, Shape};

use crate::Args;
use crate::guest::Travel;

pub const HEAD: &str = "| network away, s | reconnect window | pages go on after, s | new connections | silence reported, s |\n\
                        | --- | --- | --- | --- | --- |";

const DELAY: Duration = Duration::from_millis(5);
/// Time from the start until the cut.
const BEFORE: Duration = Duration::from_secs(3);
const WINDOW: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest outage, in seconds, that a connection survives without a window. After a longer one, the
/// migration fails and the guest keeps running.
const LONGEST_WITHOUT: f64 = 20.0;
/// Goal: seconds after the network's return.
const WANTED: f64 = 1.0;

pub fn rows(args: &Args) -> impl Iterator<Item = Result<(String, Goal), Failure>> {
    let cuts = args.cut.iter().flat_map(|seconds| [false, true].map(|has_window| (*seconds, has_window)));
    let cuts = cuts.filter(|(seconds, has_window)| *has_window || *seconds <= LONGEST_WITHOUT);
    cuts.map(|(seconds, has_window)| {
        row(args, seconds, has_window)
            .map_err(|why| format!("away for {seconds} s, window {has_window}: {why}"))
    })
}

fn row(args: &Args, seconds: f64, has_window: bool) -> Result<(String, Goal), Failure> {
    let bytes_per_second = args.rate * 1_000_000;
    let shape = Shape { bytes_per_second, delay: DELAY, ..Shape::default() };
    let link = Link::new(shape, args.seed)?;
    let reconnect_window = if has_window { WINDOW } else { Duration::ZERO };
    let parameters = Parameters { max_bandwidth_bytes: 0, reconnect_window, ..Parameters::default() };
    let ram_bytes = (bytes_per_second * 20).next_multiple_of(2 << 20);
    let travel = Travel::begin(&link, ram_bytes, &parameters)?;
    std::thread::sleep(BEFORE);

    link.set_both(Shape { is_cut: true, ..shape });
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let before = link.delivered_bytes(Direction::There);
    link.set_both(shape);
    let back = Instant::now();
    let wanted = before + bytes_per_second / 10;
    travel.until(PATIENCE, || link.delivered_bytes(Direction::There) >= wanted)?;
    let late = back.elapsed().as_secs_f64();

    link.set_both(Shape { bytes_per_second: 0, ..shape });
    let statistics = travel.end()?.statistics();
    let reported: Duration = statistics.reconnections.iter().map(|lost| lost.took).sum();
    let reported = reported.as_secs_f64();
    let (count, window) = (statistics.reconnections.len(), if has_window { "yes" } else { "no" });
    let text = format!("| {seconds} | {window} | {late:.2} | {count} | {reported:.1} |");
    let what = format!("away for {seconds} s, window: {window}: pages go on, s after the network is back");
    Ok((text, Goal::of(&what, late, "", Bound::AtMost(WANTED))))
}
