//! The timeline: rounds as bands, and below them on the same time axis what was sent, dirtied and left.

use sterna::{Round, Statistics};

use super::axis::Axis;
use super::series::{self, Span};
use super::svg::Svg;
use crate::derived::dirtied_in;
use crate::units;

const WIDTH: f64 = 1080.0;
const LEFT: f64 = 86.0;
const RIGHT: f64 = 1062.0;
const BANDS_TOP: f64 = 26.0;
const BAND: f64 = 30.0;
const CHART: f64 = 170.0;
/// Room between two charts, for the lower one's title.
const GAP: f64 = 44.0;

/// The `<svg>`.
pub fn picture(figures: &Statistics) -> String {
    let spans = series::spans(figures);
    let time = Axis::time(series::end(figures));
    let rates_top = BANDS_TOP + BAND + GAP;
    let left_top = rates_top + CHART + GAP;
    let bottom = left_top + CHART;
    let mut svg = Svg::new(WIDTH, bottom + 44.0, "Rounds, rates and remaining bytes over time");

    stopped_shade(&mut svg, figures, &time, bottom);
    rounds(&mut svg, figures, &time, bottom);
    rates(&mut svg, &spans, &time, rates_top);
    remaining(&mut svg, figures, &spans, &time, left_top);
    time_axis(&mut svg, &time, bottom);
    svg.finish()
}

fn x(time: &Axis, seconds: f64) -> f64 {
    LEFT + time.at(seconds) * (RIGHT - LEFT)
}

/// The guest's pause, behind everything.
fn stopped_shade(svg: &mut Svg, figures: &Statistics, time: &Axis, bottom: f64) {
    let Some(round) = figures.rounds.iter().find(|round| round.stopped) else { return };
    let end = series::end(figures);
    let began = round.began.as_secs_f64();
    let downtime = figures.downtime.map(|time| time.as_secs_f64());
    let from = downtime.map_or(began, |downtime| (end - downtime).min(began)).max(0.0);
    let (left, right) = (x(time, from), x(time, end));
    let tip = format!("guest stopped: {}", units::seconds(downtime.unwrap_or(end - from)));
    svg.rect("stopped", left, BANDS_TOP - 6.0, (right - left).max(2.0), bottom - BANDS_TOP + 6.0, &tip);
}

fn rounds(svg: &mut Svg, figures: &Statistics, time: &Axis, bottom: f64) {
    svg.text("title", LEFT, BANDS_TOP - 11.0, "Rounds");
    svg.text("legend sync-key", RIGHT, BANDS_TOP - 11.0, "marks at the ends: sync");
    for (index, round) in figures.rounds.iter().enumerate() {
        let (began, sync) = (round.began.as_secs_f64(), round.sync.as_secs_f64());
        let (from, to) = (x(time, began), x(time, began + round.took.as_secs_f64()));
        let class = match (round.stopped, round.number % 2) {
            (true, _) => "round last",
            (false, 1) => "round odd",
            (false, _) => "round even",
        };
        svg.rect(
            class,
            from,
            BANDS_TOP,
            (to - from).max(1.5),
            BAND,
            &round_tip(round, dirtied_in(figures, index)),
        );
        let sync = x(time, began + sync) - LEFT - (x(time, began) - LEFT);
        if !round.sync.is_zero() {
            let tip = format!("round {}: sync {}", round.number, units::time(round.sync));
            svg.rect("sync", to - sync.max(1.0), BANDS_TOP, sync.max(1.0), BAND, &tip);
        }
        if to - from > 26.0 {
            svg.text(
                "band-label",
                (from + to) / 2.0,
                BANDS_TOP + BAND / 2.0 + 4.5,
                &round.number.to_string(),
            );
        }
        if round.number > 1 {
            svg.line("round-edge", from, BANDS_TOP + BAND, from, bottom);
        }
    }
}

fn round_tip(round: &Round, dirtied: u64) -> String {
    let mut tip = format!(
        "round {}{}\nbegan at {}, took {}\n{} pages, {}\nwriting {}, idle {}, sync {}",
        round.number,
        if round.stopped { " (guest stopped)" } else { "" },
        units::time(round.began),
        units::time(round.took),
        units::count(round.pages),
        units::bytes(round.bytes),
        units::time(round.lanes.moving),
        units::time(round.lanes.idle),
        units::time(round.sync),
    );
    if !round.lanes.throttled.is_zero() {
        tip += &format!("\nlimited by max-bandwidth {}", units::time(round.lanes.throttled));
    }
    tip + &format!("\n{} pages dirtied during the round", units::count(dirtied))
}

fn rates(svg: &mut Svg, spans: &[Span], time: &Axis, top: f64) {
    let most = spans.iter().map(|span| span.sent_rate.max(span.dirty_rate)).fold(0.0, f64::max);
    let axis = Axis::bytes(most, "/s");
    frame(svg, &axis, top);
    svg.text("title", LEFT, top - 11.0, "Sent and dirtied");
    svg.text("legend sent-key", RIGHT - 150.0, top - 11.0, "■ sent per second");
    svg.text("legend dirty-key", RIGHT, top - 11.0, "━ dirtied per second");
    let steps = |value: &dyn Fn(&Span) -> f64| -> Vec<(f64, f64)> {
        let y = |span: &Span| top + CHART * (1.0 - axis.at(value(span)));
        spans.iter().flat_map(|span| [(x(time, span.from), y(span)), (x(time, span.to), y(span))]).collect()
    };
    svg.path("sent", &steps(&|span| span.sent_rate), Some(top + CHART));
    svg.path("dirty", &steps(&|span| span.dirty_rate), None);
    hits(svg, spans, time, top);
}

fn remaining(svg: &mut Svg, figures: &Statistics, spans: &[Span], time: &Axis, top: f64) {
    let start = spans.first().map(|span| (span.from, figures.ram_total_bytes as f64));
    let points: Vec<(f64, f64)> =
        start.into_iter().chain(spans.iter().map(|span| (span.to, span.remaining))).collect();
    let axis = Axis::bytes(points.iter().map(|point| point.1).fold(0.0, f64::max), "");
    frame(svg, &axis, top);
    svg.text("title", LEFT, top - 11.0, "Remaining");
    let drawn: Vec<(f64, f64)> = points
        .iter()
        .map(|(seconds, bytes)| (x(time, *seconds), top + CHART * (1.0 - axis.at(*bytes))))
        .collect();
    svg.path("left", &drawn, Some(top + CHART));
    hits(svg, spans, time, top);
}

/// Invisible bars over each span, for their tooltips.
fn hits(svg: &mut Svg, spans: &[Span], time: &Axis, top: f64) {
    for span in spans {
        let tip = format!(
            "{} to {}\nsent {}\ndirtied {}\nremaining {}",
            units::seconds(span.from),
            units::seconds(span.to),
            units::rate(span.sent_rate),
            units::rate(span.dirty_rate),
            units::bytes(span.remaining as u64),
        );
        let (from, to) = (x(time, span.from), x(time, span.to));
        svg.rect("hit", from, top, to - from, CHART, &tip);
    }
}

fn frame(svg: &mut Svg, axis: &Axis, top: f64) {
    for (value, label) in &axis.ticks {
        let y = top + CHART * (1.0 - axis.at(*value));
        svg.line(if *value == 0.0 { "base" } else { "grid" }, LEFT, y, RIGHT, y);
        svg.text("y-label", LEFT - 8.0, y + 4.0, label);
    }
}

fn time_axis(svg: &mut Svg, time: &Axis, bottom: f64) {
    for (seconds, label) in &time.ticks {
        let x = x(time, *seconds);
        svg.line("tick", x, bottom, x, bottom + 5.0);
        svg.text("x-label", x, bottom + 20.0, label);
    }
    svg.text("x-label", (LEFT + RIGHT) / 2.0, bottom + 40.0, "time since the migration began");
}
