//! The timeline: rounds as bands, and below them charts of sent, dirtied and remaining bytes.

use sterna::{Round, Statistics};

use super::axis::Axis;
use super::keys::keys;
use super::layout::{self, CHART, FOOT, GAP, LEFT, WIDTH, x};
use super::series::{self, Span};
use super::svg::Svg;
use crate::derived;
use crate::units;

/// Upper edge of marks that cross all charts; their labels are above the bands.
const MARKS_TOP: f64 = 32.0;
const BANDS_TOP: f64 = 54.0;
const BAND: f64 = 30.0;
/// The text for a rate or a count that was not measured.
pub const UNMEASURED: &str = "not measured";

/// The legend and the `<svg>`.
pub fn picture(figures: &Statistics) -> String {
    let spans = series::spans(figures);
    let time = Axis::time(series::end(figures));
    let rates_top = BANDS_TOP + BAND + GAP;
    let left_top = rates_top + CHART + GAP;
    let bottom = left_top + CHART;
    let mut svg = Svg::new(WIDTH, bottom + FOOT, "Rounds, rates and remaining bytes over time");

    let outages = series::outages(figures);
    layout::outages(&mut svg, &outages, &time, (MARKS_TOP, bottom));
    let stopped = stopped(figures);
    for (from, to) in &stopped {
        let (left, right) = (x(&time, *from), x(&time, *to));
        let tip = format!("guest stopped: {}", units::seconds(to - from));
        svg.rect("stopped", left, MARKS_TOP, (right - left).max(2.0), bottom - MARKS_TOP, &tip);
    }
    rounds(&mut svg, figures, &time, bottom);
    postcopy_band(&mut svg, figures, &time);
    rates(&mut svg, &spans, &time, rates_top);
    remaining(&mut svg, figures, &spans, &time, left_top);
    layout::switch(&mut svg, layout::switched_at(figures), &time, (MARKS_TOP, bottom));
    layout::time_axis(&mut svg, &time, bottom, "time since the migration began");

    let count = spans.iter().filter(|span| span.dirty_rate.is_some()).count();
    let dirtied = match count {
        0 => "dirtied per second: not measured",
        count if count < spans.len() => "dirtied per second (gap: not measured)",
        _ => "dirtied per second",
    };
    let mut shown = vec![
        ("sent", "sent per second".to_owned()),
        ("dirty", dirtied.to_owned()),
        ("left", "remaining".to_owned()),
    ];
    shown.extend(
        figures.rounds.iter().any(|round| !round.sync.is_zero()).then(|| ("sync", "sync".to_owned())),
    );
    if !stopped.is_empty() {
        let time: f64 = stopped.iter().map(|(from, to)| to - from).sum();
        shown.push(("stopped", format!("guest stopped ({})", units::seconds(time))));
    }
    shown.extend(layout::mark_keys(figures));
    keys(shown) + &svg.finish()
}

/// Times in which the guest ran on neither side.
/// One for each switchover that a lost connection undid, and one for the last switchover, until the switch to
/// postcopy or the end.
fn stopped(figures: &Statistics) -> Vec<(f64, f64)> {
    let span = |round: &Round| (round.began.as_secs_f64(), (round.began + round.took).as_secs_f64());
    let (last, before) = match figures.rounds.split_last() {
        Some((last, before)) => (Some(last), before),
        None => (None, &[][..]),
    };
    let is_undone = |round: &&Round| round.stopped && round.unfinished;
    let mut spans: Vec<_> = before.iter().filter(is_undone).map(span).collect();
    let end = layout::switched_at(figures).unwrap_or_else(|| series::end(figures));
    match figures.downtime.map(|time| time.as_secs_f64()) {
        Some(downtime) => spans.push(((end - downtime).max(0.0), end)),
        None => {
            spans.extend(last.filter(|last| last.stopped).map(|last| (span(last).0, end.max(span(last).0))))
        }
    }
    spans
}

fn rounds(svg: &mut Svg, figures: &Statistics, time: &Axis, bottom: f64) {
    svg.text("title", LEFT, 20.0, "Rounds");
    for (index, round) in figures.rounds.iter().enumerate() {
        let (began, sync) = (round.began.as_secs_f64(), round.sync.as_secs_f64());
        let (from, to) = (x(time, began), x(time, began + round.took.as_secs_f64()));
        let class = match (round.stopped, round.unfinished, round.number % 2) {
            (true, ..) => "round last",
            (false, true, 1) => "round odd unfinished",
            (false, true, _) => "round even unfinished",
            (false, false, 1) => "round odd",
            (false, false, _) => "round even",
        };
        let width = (to - from).max(1.5);
        svg.rect(class, from, BANDS_TOP, width, BAND, &round_tip(round, derived::dirtied_in(figures, index)));
        if !round.sync.is_zero() {
            let sync = (x(time, began + sync) - x(time, began)).max(1.0);
            let tip = format!("round {}: sync {}", round.number, units::time(round.sync));
            svg.rect("sync", to - sync, BANDS_TOP, sync, BAND, &tip);
        }
        if to - from > 40.0 {
            svg.text(
                "band-label",
                (from + to) / 2.0,
                BANDS_TOP + BAND / 2.0 + 5.0,
                &round.number.to_string(),
            );
        }
        if index > 0 {
            svg.line("round-edge", from, BANDS_TOP + BAND, from, bottom);
        }
    }
}

/// Draws the band from the switch until the last page was sent, or until the end.
fn postcopy_band(svg: &mut Svg, figures: &Statistics, time: &Axis) {
    let Some(postcopy) = &figures.postcopy else { return };
    let (from, end) = (postcopy.at.as_secs_f64(), series::end(figures));
    let to = postcopy.all_sent.map_or(end, |sent| sent.as_secs_f64());
    let (left, right) = (x(time, from), x(time, to));
    let tip = format!(
        "postcopy: the guest runs at the destination, {} of pages follow\nfrom {} to {}",
        units::bytes(postcopy.missing_bytes),
        units::seconds(from),
        units::seconds(to)
    );
    svg.rect("round follow", left, BANDS_TOP, (right - left).max(1.5), BAND, &tip);
    if right - left > 120.0 {
        svg.text("band-label", (left + right) / 2.0, BANDS_TOP + BAND / 2.0 + 5.0, "postcopy");
    }
}

/// A round's number and its special state.
pub fn name(round: &Round) -> String {
    let what = match (round.stopped, round.unfinished) {
        (true, true) => " (guest stopped, not finished)",
        (true, false) => " (guest stopped)",
        (false, true) => " (not finished)",
        (false, false) => "",
    };
    format!("{}{what}", round.number)
}

fn round_tip(round: &Round, dirtied: Option<u64>) -> String {
    let mut tip = format!(
        "round {}\nbegan at {}, took {}\n{} pages, {} sent",
        name(round),
        units::time(round.began),
        units::time(round.took),
        units::count(round.pages),
        units::bytes(round.bytes),
    );
    if derived::is_timed(round) {
        let (moving, idle) = (units::time(round.lanes.moving), units::time(round.lanes.idle));
        tip += &format!("\nwriting {moving}, idle {idle}, sync {}", units::time(round.sync));
    }
    if !round.lanes.throttled.is_zero() {
        tip += &format!("\nlimited by max-bandwidth {}", units::time(round.lanes.throttled));
    }
    let dirtied = dirtied.map_or(UNMEASURED.to_owned(), |pages| format!("{} pages", units::count(pages)));
    tip + &format!("\ndirtied during the round: {dirtied}")
}

fn rates(svg: &mut Svg, spans: &[Span], time: &Axis, top: f64) {
    let most =
        spans.iter().map(|span| span.sent_rate.max(span.dirty_rate.unwrap_or(0.0))).fold(0.0, f64::max);
    let axis = Axis::bytes(most, "/s");
    layout::left_axis(svg, &axis, (top, CHART));
    layout::title(svg, top, "Sent and dirtied");
    let y = |rate: f64| top + CHART * (1.0 - axis.at(rate));
    let ends = |span: &Span| [(x(time, span.from), y(span.sent_rate)), (x(time, span.to), y(span.sent_rate))];
    let sent: Vec<(f64, f64)> = spans.iter().flat_map(ends).collect();
    svg.path("sent", &sent, Some(top + CHART));
    layout::steps(
        svg,
        "dirty",
        spans.iter().map(|span| (x(time, span.from), x(time, span.to), span.dirty_rate.map(y))),
    );
    hits(svg, spans, time, top);
}

fn remaining(svg: &mut Svg, figures: &Statistics, spans: &[Span], time: &Axis, top: f64) {
    let start = spans.first().map(|span| (span.from, figures.ram_total_bytes as f64));
    let points: Vec<(f64, f64)> =
        start.into_iter().chain(spans.iter().map(|span| (span.to, span.remaining))).collect();
    let axis = Axis::bytes(points.iter().map(|point| point.1).fold(0.0, f64::max), "");
    layout::left_axis(svg, &axis, (top, CHART));
    layout::title(svg, top, "Remaining");
    let drawn: Vec<(f64, f64)> = points
        .iter()
        .map(|(seconds, bytes)| (x(time, *seconds), top + CHART * (1.0 - axis.at(*bytes))))
        .collect();
    svg.path("left", &drawn, Some(top + CHART));
    hits(svg, spans, time, top);
}

/// Draws invisible bars over each span, for their tooltips.
fn hits(svg: &mut Svg, spans: &[Span], time: &Axis, top: f64) {
    for span in spans {
        let tip = format!(
            "{} to {}\nsent {}\ndirtied {}\nremaining {}",
            units::seconds(span.from),
            units::seconds(span.to),
            units::rate(span.sent_rate),
            span.dirty_rate.map_or(UNMEASURED.to_owned(), units::rate),
            units::bytes(span.remaining as u64),
        );
        let (from, to) = (x(time, span.from), x(time, span.to));
        svg.rect("hit", from, top, to - from, CHART, &tip);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::samples;

    #[test]
    fn guest_is_shown_as_stopped_in_each_switchover_that_was_undone_and_in_the_last() {
        let ms = Duration::from_millis;
        let mut figures = samples::engine_statistics();
        let last = (2.302, 2.35);
        let close = |spans: &[(f64, f64)], wanted: &[(f64, f64)]| {
            let is_close = |(a, b): (&(f64, f64), &(f64, f64))| (a.0 - b.0).abs() + (a.1 - b.1).abs() < 1e-9;
            assert!(spans.len() == wanted.len() && spans.iter().zip(wanted).all(is_close), "{spans:?}");
        };
        close(&stopped(&figures), &[last]);

        let undone =
            Round { began: ms(900), took: ms(40), stopped: true, unfinished: true, ..Round::default() };
        figures.rounds.insert(0, undone);
        close(&stopped(&figures), &[(0.9, 0.94), last]);

        // The migration failed after the reconnection, while the guest was running.
        figures.downtime = None;
        figures.rounds.pop();
        close(&stopped(&figures), &[(0.9, 0.94)]);
    }

    #[test]
    fn guest_in_postcopy_is_shown_as_stopped_before_the_switch() {
        let record = samples::record_of_postcopy();

        let spans = stopped(&record.statistics);

        assert_eq!(spans.len(), 1);
        assert!((spans[0].1 - 3.2).abs() < 1e-9 && (spans[0].0 - 3.152).abs() < 1e-9, "{spans:?}");
    }
}
