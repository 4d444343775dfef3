//! Sizes and elements that all pictures over time share.

use super::axis::Axis;
use super::series::{self, Outage};
use super::svg::Svg;
use crate::units;

/// Width of a picture, in its own units. The page scales it to the available width.
pub const WIDTH: f64 = 1080.0;
/// Left edge of charts. It leaves room for the labels of the left axis, also in the larger font of a narrow
/// page.
pub const LEFT: f64 = 118.0;
/// Right edge of charts. It leaves room for half of the last label of the time axis.
pub const RIGHT: f64 = 1040.0;
/// Height of a chart.
pub const CHART: f64 = 170.0;
/// Space between two charts, for the lower one's title.
pub const GAP: f64 = 48.0;
/// Space below the lowest chart, for the labels of its time axis.
pub const FOOT: f64 = 60.0;

/// Horizontal position of `value`.
pub fn x(axis: &Axis, value: f64) -> f64 {
    LEFT + axis.at(value) * (RIGHT - LEFT)
}

/// Draws a title above a chart whose upper edge is `top`.
pub fn title(svg: &mut Svg, top: f64, words: &str) {
    svg.text("title", LEFT, top - 13.0, words);
}

/// Draws the lines and labels of the left axis.
pub fn left_axis(svg: &mut Svg, axis: &Axis, (top, height): (f64, f64)) {
    for (value, label) in &axis.ticks {
        let y = top + height * (1.0 - axis.at(*value));
        svg.line(if *value == 0.0 { "base" } else { "grid" }, LEFT, y, RIGHT, y);
        svg.text("y-label", LEFT - 8.0, y + 4.0, label);
    }
}

/// Draws the axis below the lowest chart. A narrow page leaves out every second label.
pub fn time_axis(svg: &mut Svg, time: &Axis, bottom: f64, words: &str) {
    for (index, (value, label)) in time.ticks.iter().enumerate() {
        let x = x(time, *value);
        svg.line("tick", x, bottom, x, bottom + 5.0);
        svg.text(if index % 2 == 1 { "x-label minor" } else { "x-label" }, x, bottom + 24.0, label);
    }
    svg.text("x-label", (LEFT + RIGHT) / 2.0, bottom + 50.0, words);
}

/// Marks times without a connection, over the whole height.
pub fn outages(svg: &mut Svg, outages: &[Outage<'_>], time: &Axis, (top, bottom): (f64, f64)) {
    for Outage { from, to, lost } in
        outages.iter().filter(|outage| outage.to >= time.start && outage.from <= time.end)
    {
        let (left, right) = (x(time, *from), x(time, *to));
        let mut tip = format!(
            "no connection for {}, from {} on\n{}\n{} of pages were sent again",
            units::time(lost.took),
            units::seconds(*from),
            lost.why,
            units::bytes(lost.resent_bytes)
        );
        if let Some(stood) = lost.stood {
            tip += &format!(
                "\nthe guest was stopped for {} in a switchover that was cancelled",
                units::time(stood)
            );
        }
        svg.rect("outage", left, top, (right - left).max(2.0), bottom - top, &tip);
    }
}

/// Draws a line at the switch to postcopy.
pub fn switch(svg: &mut Svg, at: Option<f64>, time: &Axis, (top, bottom): (f64, f64)) {
    let Some(at) = at.filter(|at| (time.start..=time.end).contains(at)) else { return };
    let x = x(time, at);
    svg.line("switch", x, top, x, bottom);
    let class = if x > (LEFT + RIGHT) / 2.0 { "mark before" } else { "mark" };
    let beside = if x > (LEFT + RIGHT) / 2.0 { x - 6.0 } else { x + 6.0 };
    svg.text(class, beside, top + 12.0, &format!("switch to postcopy, {}", units::seconds(at)));
}

/// Draws a step line. Each span is its start, its end and the height; without a height, there is a gap.
pub fn steps(svg: &mut Svg, class: &str, spans: impl IntoIterator<Item = (f64, f64, Option<f64>)>) {
    let mut points: Vec<(f64, f64)> = Vec::new();
    for (from, to, y) in spans {
        match y {
            Some(y) => points.extend([(from, y), (to, y)]),
            None => {
                svg.path(class, &points, None);
                points.clear();
            }
        }
    }
    svg.path(class, &points, None);
}

/// Time of the switch to postcopy, seconds since the start.
pub fn switched_at(figures: &sterna::Statistics) -> Option<f64> {
    figures.postcopy.as_ref().map(|postcopy| postcopy.at.as_secs_f64())
}

/// The keys of the marks in a migration's pictures.
pub fn mark_keys(figures: &sterna::Statistics) -> Vec<(&'static str, String)> {
    let mut keys = Vec::new();
    let outages = series::outages(figures);
    if !outages.is_empty() {
        let time: f64 = outages.iter().map(|outage| outage.to - outage.from).sum();
        let times = if outages.len() == 1 { "once".to_owned() } else { format!("{} times", outages.len()) };
        keys.push(("outage", format!("no connection ({times}, {} in all)", units::seconds(time))));
    }
    if let Some(at) = switched_at(figures) {
        keys.push(("switch", format!("switch to postcopy (at {})", units::seconds(at))));
    }
    keys
}
