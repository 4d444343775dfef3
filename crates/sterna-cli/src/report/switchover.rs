//! A picture of the downtime, as one bar of its parts.

use sterna::{Statistics, SwitchoverStep};

use super::axis::Axis;
use super::keys::keys;
use super::layout::{RIGHT, WIDTH};
use super::svg::Svg;
use crate::units;

const LEFT: f64 = 24.0;
const BAR_TOP: f64 = 8.0;
const BAR: f64 = 42.0;

/// The `<svg>` and its legend.
pub fn picture(statistics: &Statistics) -> String {
    let sum: f64 = statistics.switchover.iter().map(|(_, took)| took.as_secs_f64()).sum();
    let time = Axis::time(sum);
    let axis_y = BAR_TOP + BAR;
    let mut svg = Svg::new(WIDTH, axis_y + 36.0, "The parts of the pause");
    let x = |seconds: f64| LEFT + time.at(seconds) * (RIGHT - LEFT);
    let mut shown = Vec::new();

    let mut from = 0.0;
    for (at, (step, took)) in statistics.switchover.iter().enumerate() {
        let took = took.as_secs_f64();
        let to = from + took;
        let tip = format!("{}: {}", words(*step), units::seconds(took));
        let class = format!("part p{}", at % 7);
        svg.rect(&class, x(from), BAR_TOP, (x(to) - x(from)).max(0.75), BAR, &tip);
        if x(to) - x(from) > 110.0 {
            svg.text("band-label", (x(from) + x(to)) / 2.0, BAR_TOP + BAR / 2.0 + 4.5, &units::seconds(took));
        }
        let percent = if sum > 0.0 { took / sum * 100.0 } else { 0.0 };
        shown.push((KEYS[at % 7], format!("{} – {} ({percent:.0} %)", words(*step), units::seconds(took))));
        from = to;
    }
    for (index, (seconds, label)) in time.ticks.iter().enumerate() {
        svg.line("tick", x(*seconds), axis_y, x(*seconds), axis_y + 5.0);
        svg.text(if index % 2 == 1 { "x-label minor" } else { "x-label" }, x(*seconds), axis_y + 26.0, label);
    }
    svg.finish() + &keys(shown)
}

/// The style classes of the parts.
const KEYS: [&str; 7] = ["p0", "p1", "p2", "p3", "p4", "p5", "p6"];

/// A description of a part of the downtime, for readers without the documentation.
fn words(step: SwitchoverStep) -> &'static str {
    match step {
        SwitchoverStep::Stop => "stopping the vCPUs",
        SwitchoverStep::ReleaseHooks => "releasing disks and locks",
        SwitchoverStep::LastSync => "last sync",
        SwitchoverStep::LastPages => "last pages",
        SwitchoverStep::Streams => "streams",
        SwitchoverStep::Devices => "saving and sending the devices",
        SwitchoverStep::Prepare => "prepare: the destination loads",
        SwitchoverStep::Start => "commit until acknowledged: the destination starts",
        _ => "another step",
    }
}
