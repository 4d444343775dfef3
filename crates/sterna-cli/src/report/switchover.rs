//! The pause that the guest suffered, as one bar of its parts.

use super::axis::Axis;
use super::svg::Svg;
use crate::figures::Figures;
use crate::units;

const WIDTH: f64 = 1080.0;
const LEFT: f64 = 24.0;
const RIGHT: f64 = 1056.0;
const BAR_TOP: f64 = 8.0;
const BAR: f64 = 42.0;
const ROW: f64 = 24.0;

/// The `<svg>`.
pub fn picture(figures: &Figures) -> String {
    let sum: f64 = figures.switchover.iter().map(|step| step.1).sum();
    let time = Axis::time(sum);
    let rows = figures.switchover.len().div_ceil(2) as f64;
    let axis_y = BAR_TOP + BAR;
    let legend_top = axis_y + 48.0;
    let mut svg = Svg::new(WIDTH, legend_top + rows * ROW, "The parts of the pause");
    let x = |seconds: f64| LEFT + time.at(seconds) * (RIGHT - LEFT);

    let mut from = 0.0;
    for (at, step) in figures.switchover.iter().enumerate() {
        let to = from + step.1;
        let tip = format!("{}: {}", words(&step.0), units::seconds(step.1));
        let class = format!("part p{}", at % 7);
        svg.rect(&class, x(from), BAR_TOP, (x(to) - x(from)).max(0.75), BAR, &tip);
        if x(to) - x(from) > 64.0 {
            svg.text(
                "band-label",
                (x(from) + x(to)) / 2.0,
                BAR_TOP + BAR / 2.0 + 4.5,
                &units::seconds(step.1),
            );
        }
        let (column, row) = ((at % 2) as f64, (at / 2) as f64);
        let (left, baseline) = (LEFT + column * (RIGHT - LEFT) / 2.0, legend_top + row * ROW);
        svg.rect(&format!("key p{}", at % 7), left, baseline - 11.0, 13.0, 13.0, "");
        let percent = if sum > 0.0 { step.1 / sum * 100.0 } else { 0.0 };
        let label = format!("{} – {} ({percent:.0} %)", words(&step.0), units::seconds(step.1));
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
fn words(step: &str) -> &str {
    match step {
        "stop" => "stopping the vCPUs",
        "release-hooks" => "releasing disks and locks",
        "last-sync" => "last harvest of dirty bits",
        "last-pages" => "last pages",
        "devices" => "saving and sending the devices",
        "prepare" => "prepare: the destination loads",
        "start" => "commit until acknowledged: the destination starts",
        other => other,
    }
}
