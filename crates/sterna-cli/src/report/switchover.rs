//! The pause that the guest suffered, as one bar of its parts.

use sterna::{Statistics, SwitchoverStep};

use super::axis::Axis;
use super::svg::Svg;
use crate::units;

const WIDTH: f64 = 1080.0;
const LEFT: f64 = 24.0;
const RIGHT: f64 = 1056.0;
const BAR_TOP: f64 = 8.0;
const BAR: f64 = 42.0;
const ROW: f64 = 24.0;

/// The `<svg>`.
pub fn picture(statistics: &Statistics) -> String {
    let sum: f64 = statistics.switchover.iter().map(|(_, took)| took.as_secs_f64()).sum();
    let time = Axis::time(sum);
    let rows = statistics.switchover.len().div_ceil(2) as f64;
    let axis_y = BAR_TOP + BAR;
    let legend_top = axis_y + 48.0;
    let mut svg = Svg::new(WIDTH, legend_top + rows * ROW, "The parts of the pause");
    let x = |seconds: f64| LEFT + time.at(seconds) * (RIGHT - LEFT);

    let mut from = 0.0;
    for (at, (step, took)) in statistics.switchover.iter().enumerate() {
        let took = took.as_secs_f64();
        let to = from + took;
        let tip = format!("{}: {}", words(*step), units::seconds(took));
        let class = format!("part p{}", at % 7);
        svg.rect(&class, x(from), BAR_TOP, (x(to) - x(from)).max(0.75), BAR, &tip);
        if x(to) - x(from) > 64.0 {
            svg.text("band-label", (x(from) + x(to)) / 2.0, BAR_TOP + BAR / 2.0 + 4.5, &units::seconds(took));
        }
        let (column, row) = ((at % 2) as f64, (at / 2) as f64);
        let (left, baseline) = (LEFT + column * (RIGHT - LEFT) / 2.0, legend_top + row * ROW);
        svg.rect(&format!("key p{}", at % 7), left, baseline - 11.0, 13.0, 13.0, "");
        let percent = if sum > 0.0 { took / sum * 100.0 } else { 0.0 };
        let label = format!("{} – {} ({percent:.0} %)", words(*step), units::seconds(took));
        svg.text("key-label", left + 21.0, baseline, &label);
        from = to;
    }
    for (seconds, label) in &time.ticks {
        svg.line("tick", x(*seconds), axis_y, x(*seconds), axis_y + 5.0);
        svg.text("x-label", x(*seconds), axis_y + 20.0, label);
    }
    svg.finish()
}

/// What a part of the pause is, for those who have not read the documentation.
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
