//! The plan as an SVG picture.
//! The upper chart shows the remaining bytes over time, round by round. The lower one shows the downtime
//! limit that each rule needs, over the dirty rate.

use sterna::forecast::rules::{qemu, sterna as ours};
use sterna::forecast::{Forecast, PlannedRound};

use super::format::Plan;
use crate::report::axis::Axis;
use crate::report::svg::Svg;
use crate::units;

const WIDTH: f64 = 1080.0;
const LEFT: f64 = 86.0;
const RIGHT: f64 = 1062.0;
const TOP: f64 = 34.0;
const CHART: f64 = 210.0;
const GAP: f64 = 84.0;
/// Points of a rule's line.
const STEPS: u32 = 240;

/// The text of the SVG file.
pub fn picture(plan: &Plan) -> String {
    let rules_top = if plan.forecast.is_some() { TOP + CHART + GAP } else { TOP };
    let mut svg = Svg::file(
        WIDTH,
        rules_top + CHART + 44.0,
        "A migration's forecast",
        include_str!("../report/style.css"),
    );
    if let Some(forecast) = &plan.forecast {
        remaining(&mut svg, plan, forecast);
    }
    limits(&mut svg, plan, rules_top);
    svg.finish()
}

/// The remaining bytes. They fall during a round, and rise at its end by the bytes dirtied meanwhile.
fn remaining(svg: &mut Svg, plan: &Plan, forecast: &Forecast) {
    let rounds = &forecast.curve;
    let end = rounds.last().map_or(0.0, |round| round.began + round.took);
    let time = Axis::time(end);
    let most = rounds.iter().map(|round| round.bytes).fold(0.0, f64::max);
    let bytes = Axis::bytes(most, "");
    let (x, y) = (across(&time), down(&bytes, TOP));
    frame(svg, &bytes, TOP);
    let title = if forecast.convergent { "Remaining, as forecast" } else { "Remaining: does not converge" };
    svg.text("title", LEFT, TOP - 12.0, title);
    let mut line = Vec::new();
    for round in rounds {
        let sending = (round.bytes / plan.inputs.bandwidth_bytes.max(1) as f64).min(round.took);
        line.extend([
            (x(round.began), y(round.bytes)),
            (x(round.began + sending), y(0.0)),
            (x(round.began + round.took), y(0.0)),
        ]);
    }
    svg.path("left", &line, Some(TOP + CHART));
    for round in rounds {
        let (from, to) = (x(round.began), x(round.began + round.took));
        let class = if round.stopped { "stopped" } else { "hit" };
        svg.rect(class, from, TOP, (to - from).max(1.0), CHART, &tip(round));
    }
    bottom(svg, &time, TOP + CHART, "time since the migration begins");
}

fn tip(round: &PlannedRound) -> String {
    format!(
        "{}\nbegins at {}, lasts {}\nsends {}\ndirtied during it {}",
        if round.stopped { "guest stopped".into() } else { format!("round {}", round.number) },
        units::seconds(round.began),
        units::seconds(round.took),
        units::bytes(round.bytes as u64),
        units::bytes(round.dirtied_bytes as u64),
    )
}

/// The downtime limit that each rule needs, over the dirty rate.
fn limits(svg: &mut Svg, plan: &Plan, top: f64) {
    let inputs = &plan.inputs;
    let (b, x, paused) = (inputs.bandwidth_bytes as f64, inputs.sync, inputs.fixed.downtime());
    let limit = inputs.downtime_limit.as_secs_f64();
    let needed = plan.rules.engine.downtime_needed.unwrap_or(0.0);
    let most = limit.max(needed).max(plan.rules.qemu.downtime_needed.unwrap_or(0.0).min(limit * 3.0)) * 1.4;
    let rates = Axis::decimal(b.max(plan.rules.dirty_bytes) * 1.05, "B/s");
    let limits = Axis::time(most);
    let (across, down) = (across(&rates), down(&limits, top));
    frame(svg, &limits, top);
    svg.text("title", LEFT, top - 12.0, "Downtime limit needed");
    svg.text("legend dirty-key", RIGHT - 190.0, top - 12.0, "━ by QEMU's rule");
    svg.text("legend sent-key", RIGHT, top - 12.0, "━ by Sterna's rule");
    let line = |needed: &dyn Fn(f64) -> Option<f64>| -> Vec<(f64, f64)> {
        (0..STEPS)
            .map(|step| b * f64::from(step) / f64::from(STEPS))
            .map_while(|rate| needed(rate).filter(|seconds| *seconds <= most).map(|seconds| (rate, seconds)))
            .map(|(rate, seconds)| (across(rate), down(seconds)))
            .collect()
    };
    svg.path("dirty", &line(&|rate| qemu::downtime_needed(b, rate, x)), None);
    svg.path("sent-line", &line(&|rate| ours::limit_that_fits(b, rate, x, paused)), None);
    svg.line("limit", LEFT, down(limit), RIGHT, down(limit));
    svg.text("limit-label", LEFT + 8.0, down(limit) - 6.0, &format!("limit {}", units::seconds(limit)));
    let guest = across(plan.rules.dirty_bytes);
    svg.line("guest", guest, top, guest, top + CHART);
    let label = format!("this guest {}", units::decimal_rate(plan.rules.dirty_bytes));
    let (class, beside) = if guest > (LEFT + RIGHT) / 2.0 { ("legend", -8.0) } else { ("limit-label", 8.0) };
    svg.text(class, guest + beside, top + 16.0, &label);
    bottom(svg, &rates, top + CHART, "dirty rate; the right end is the bandwidth");
}

fn across(axis: &Axis) -> impl Fn(f64) -> f64 {
    |value| LEFT + axis.at(value) * (RIGHT - LEFT)
}

fn down(axis: &Axis, top: f64) -> impl Fn(f64) -> f64 {
    move |value| top + CHART * (1.0 - axis.at(value))
}

fn frame(svg: &mut Svg, axis: &Axis, top: f64) {
    for (value, label) in &axis.ticks {
        let y = top + CHART * (1.0 - axis.at(*value));
        svg.line(if *value == 0.0 { "base" } else { "grid" }, LEFT, y, RIGHT, y);
        svg.text("y-label", LEFT - 8.0, y + 4.0, label);
    }
}

fn bottom(svg: &mut Svg, axis: &Axis, y: f64, words: &str) {
    for (value, label) in &axis.ticks {
        let x = LEFT + axis.at(*value) * (RIGHT - LEFT);
        svg.line("tick", x, y, x, y + 5.0);
        svg.text("x-label", x, y + 20.0, label);
    }
    svg.text("x-label", (LEFT + RIGHT) / 2.0, y + 40.0, words);
}
