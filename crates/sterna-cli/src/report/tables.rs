//! The figures as tables.

use std::fmt::Write;

use sterna::forecast::Range;
use sterna::{LaneTimes, Statistics, Status};

use super::svg::escape;
use crate::derived;
use crate::record::Record;
use crate::summary;
use crate::units;

/// Title, verdict and the four figures that matter most.
pub fn head(record: &Record) -> String {
    let statistics = &record.statistics;
    let mut html = String::from("<header>\n<h1>Migration</h1>\n");
    let _ = writeln!(
        html,
        "<p class=\"way\">{} → {} <span class=\"status {}\">{}</span></p>",
        escape(&record.source),
        escape(&record.destination),
        if statistics.status == Status::Completed { "good" } else { "bad" },
        escape(&statistics.status.to_string()),
    );
    if let Some(error) = &statistics.error {
        let _ = writeln!(html, "<p class=\"error\">{}</p>", escape(error));
    }
    html.push_str("</header>\n<section class=\"tiles\">\n");
    let mut tile = |name: &str, value: String| {
        let _ = writeln!(
            html,
            "<div class=\"tile\"><div class=\"value\">{}</div><div class=\"name\">{name}</div></div>",
            escape(&value)
        );
    };
    tile("total time", units::time(statistics.total_time));
    tile("downtime", statistics.downtime.map_or("–".into(), units::time));
    tile("bandwidth while sending", derived::moving_bandwidth(statistics).map_or("–".into(), units::rate));
    tile("rounds", statistics.rounds.len().to_string());
    html.push_str("</section>\n");
    html
}

/// What was forecast beside what happened; nothing without a forecast.
pub fn forecast(record: &Record) -> String {
    let Some(plan) = &record.forecast else { return String::new() };
    let mut html = String::from("<section>\n<h2>Forecast and outcome</h2>\n");
    let forecast = match &plan.forecast {
        Some(forecast) => forecast,
        None => return String::new(),
    };
    let certainty = match (forecast.convergent, forecast.certain) {
        (true, true) => "It was expected to converge.",
        (true, false) => "It was expected to converge, but only just.",
        (false, _) => "It was expected not to converge.",
    };
    let _ = writeln!(html, "<p>{certainty}</p>");
    html.push_str(
        "<table>\n<thead><tr><th></th><th>expected</th><th>from</th><th>to</th><th>was</th><th>off by</th></tr></thead>\n\
         <tbody>\n",
    );
    let statistics = &record.statistics;
    let is_known = statistics.status == Status::Completed;
    let mut row = |name: &str, range: &Range, was: Option<f64>, words: &dyn Fn(f64) -> String| {
        let shown = |figure: Option<f64>| figure.map_or("–".into(), words);
        let was = was.filter(|_| is_known);
        let off = match (range.expected, was) {
            (Some(expected), Some(was)) if was > 0.0 => format!("{:+.0} %", (expected / was - 1.0) * 100.0),
            _ => "–".into(),
        };
        let _ = writeln!(
            html,
            "<tr><td>{name}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{off}</td></tr>",
            shown(range.expected),
            shown(range.low),
            shown(range.high),
            shown(was),
        );
    };
    let running = statistics.rounds.iter().filter(|round| !round.stopped).count();
    row("total time", &forecast.total_time, Some(statistics.total_time.as_secs_f64()), &units::seconds);
    row("downtime", &forecast.downtime, statistics.downtime.map(|time| time.as_secs_f64()), &units::seconds);
    row("rounds with the guest running", &forecast.rounds, Some(running as f64), &|rounds| {
        format!("{rounds:.0}")
    });
    row("bytes sent", &forecast.bytes, Some(statistics.transferred_bytes as f64), &|bytes| {
        units::bytes(bytes as u64)
    });
    if let (Some(said), Some(postcopy)) = (&forecast.postcopy, &statistics.postcopy) {
        row("missing at the switch", &said.missing_bytes, Some(postcopy.missing_bytes as f64), &|bytes| {
            units::bytes(bytes as u64)
        });
        // What the destination saw, if that is known.
        let arrival = record.arrival.as_ref();
        let seen = arrival.and_then(|arrival| Some(arrival.complete?.saturating_sub(arrival.started?)));
        let sent = postcopy.all_sent.map(|sent| sent.saturating_sub(postcopy.at));
        let degraded = seen.or(sent).map(|time| time.as_secs_f64());
        row("time until the last page", &said.degraded_time, degraded, &units::seconds);
        let faults = statistics.postcopy_requests as f64;
        row("page faults", &said.faults, Some(faults), &|count| units::count(count as u64));
    }
    html.push_str("</tbody>\n</table>\n");
    if !plan.advice.is_empty() {
        html.push_str("<p>Advice before the migration:</p>\n<ul>\n");
        for advice in &plan.advice {
            let _ = writeln!(html, "<li>{}</li>", escape(advice));
        }
        html.push_str("</ul>\n");
    }
    html.push_str("</section>\n");
    html
}

/// Every round, one row each; nothing if there were none.
pub fn rounds(statistics: &Statistics) -> String {
    if statistics.rounds.is_empty() {
        return String::new();
    }
    let mut html = String::from(
        "<section>\n<h2>Rounds</h2>\n<div class=\"wide\">\n<table>\n<thead><tr><th>round</th><th>began</th><th>took</th>\
         <th>pages</th><th>bytes</th><th>rate while moving</th><th>sync</th><th>scan</th><th>re-arm</th><th>encode</th><th>moving</th><th>held back</th><th>idle</th><th>dirtied meanwhile</th>\
         </tr></thead>\n<tbody>\n",
    );
    for (index, round) in statistics.rounds.iter().enumerate() {
        let rate = if !round.lanes.moving.is_zero() {
            units::rate(round.bytes as f64 / round.lanes.moving.as_secs_f64())
        } else {
            "–".into()
        };
        let LaneTimes { scan, rearm, encode, moving, throttled, idle } = &round.lanes;
        let lanes: String = [scan, rearm, encode, moving, throttled, idle]
            .map(|time| format!("<td>{}</td>", units::time(*time)))
            .concat();
        let _ = writeln!(
            html,
            "<tr><td>{}{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{rate}</td><td>{}</td>{lanes}<td>{}</td></tr>",
            round.number,
            if round.stopped { " (stopped)" } else { "" },
            units::time(round.began),
            units::time(round.took),
            units::count(round.pages),
            units::bytes(round.bytes),
            units::time(round.sync),
            units::count(derived::dirtied_in(statistics, index)),
        );
    }
    html.push_str("</tbody>\n</table>\n</div>\n</section>\n");
    html
}

/// All other figures, name and value.
pub fn figures(record: &Record) -> String {
    let mut html = String::from("<section>\n<h2>Statistics</h2>\n<table class=\"pairs\">\n<tbody>\n");
    for (name, value) in summary::rows(record) {
        let _ = writeln!(html, "<tr><th>{}</th><td>{}</td></tr>", escape(&name), escape(&value));
    }
    html.push_str("</tbody>\n</table>\n</section>\n");
    html
}
