//! The values of a migration as HTML tables.

use std::fmt::Write;

use sterna::forecast::Range;
use sterna::{LaneTimes, Statistics, Status};

use super::svg::escape;
use super::table::Table;
use super::timeline::{UNMEASURED, name};
use crate::derived;
use crate::record::Record;
use crate::summary;
use crate::units;

/// Title, result and the four most important values.
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
    html.push_str("</header>\n");
    let (name, rate) = match derived::moving_bandwidth(statistics) {
        Some(bandwidth) => ("bandwidth while sending", Some(bandwidth)),
        None => ("throughput, mean", derived::mean_throughput(statistics)),
    };
    html + &tiles(&[
        ("total time", units::time(statistics.total_time)),
        ("downtime", statistics.downtime.map_or("–".into(), units::time)),
        (name, rate.map_or("–".into(), units::rate)),
        ("rounds", summary::rounds(statistics).to_string()),
    ])
}

/// The most important values, each with its name.
pub fn tiles(tiles: &[(&str, String)]) -> String {
    let mut html = String::from("<section class=\"tiles\">\n");
    for (name, value) in tiles {
        let _ = writeln!(
            html,
            "<div class=\"tile\"><div class=\"value\">{}</div><div class=\"name\">{name}</div></div>",
            escape(value)
        );
    }
    html.push_str("</section>\n");
    html
}

/// The forecast next to the measured values; empty without a forecast.
pub fn forecast(record: &Record) -> String {
    let Some(plan) = &record.forecast else { return String::new() };
    let mut html = String::from("<section>\n<h2>Forecast and outcome</h2>\n");
    let forecast = match &plan.forecast {
        Some(forecast) => forecast,
        None => return String::new(),
    };
    let certainty = match (forecast.convergent, forecast.certain) {
        (true, true) => "It was expected to converge.",
        (true, false) => "It was expected to converge, with little reserve.",
        (false, _) => "It was expected not to converge.",
    };
    let _ = writeln!(html, "<p>{certainty}</p>");
    let mut table = Table::new(&["figure", "expected", "from", "to", "was", "off by"]);
    let statistics = &record.statistics;
    let is_known = statistics.status == Status::Completed;
    let mut row = |name: &str, range: &Range, was: Option<f64>, words: &dyn Fn(f64) -> String| {
        let shown = |figure: Option<f64>| figure.map_or("–".into(), words);
        let was = was.filter(|_| is_known);
        let off = match (range.expected, was) {
            (Some(expected), Some(was)) if was > 0.0 => format!("{:+.0} %", (expected / was - 1.0) * 100.0),
            _ => "–".into(),
        };
        table.row([
            name,
            shown(range.expected).as_str(),
            &shown(range.low),
            &shown(range.high),
            &shown(was),
            &off,
        ]);
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
        row(
            "missing at the switch to postcopy",
            &said.missing_bytes,
            Some(postcopy.missing_bytes as f64),
            &|bytes| units::bytes(bytes as u64),
        );
        // The destination's measurements, if they are known.
        let arrival = record.arrival.as_ref();
        let seen = arrival.and_then(|arrival| Some(arrival.complete?.saturating_sub(arrival.started?)));
        let sent = postcopy.all_sent.map(|sent| sent.saturating_sub(postcopy.at));
        let degraded = seen.or(sent).map(|time| time.as_secs_f64());
        row("time until the last page", &said.degraded_time, degraded, &units::seconds);
        let faults = statistics.postcopy_requests as f64;
        row("page faults", &said.faults, Some(faults), &|count| units::count(count as u64));
    }
    html.push_str(&table.finish());
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

/// One row per round: sent bytes, and the time of the lanes. Empty without rounds.
pub fn rounds(statistics: &Statistics) -> String {
    let rounds = &statistics.rounds;
    if rounds.is_empty() {
        return String::new();
    }
    let is_timed = rounds.iter().any(derived::is_timed);
    let columns =
        ["round", "began", "took", "pages", "bytes", "rate while sending", "dirtied during it", "dirty rate"];
    // Without measured times, the other columns would be empty.
    let shown = if is_timed { columns.len() } else { 5 };
    let mut sent = Table::new(&columns[..shown]);
    let mut lanes = Table::new(&["round", "sync", "scan", "re-arm", "encode", "moving", "held back", "idle"]);
    let unmeasured = || UNMEASURED.to_owned();
    for (index, round) in rounds.iter().enumerate() {
        let number = name(round);
        let moving = round.lanes.moving;
        let rate = (!moving.is_zero()).then(|| units::rate(round.bytes as f64 / moving.as_secs_f64()));
        let cells = [
            number.clone(),
            units::time(round.began),
            units::time(round.took),
            units::count(round.pages),
            units::bytes(round.bytes),
            rate.unwrap_or_else(unmeasured),
            derived::dirtied_in(statistics, index).map_or_else(unmeasured, units::count),
            derived::dirty_rate_in(statistics, index).map_or_else(unmeasured, units::rate),
        ];
        sent.row(cells.iter().take(shown).map(String::as_str));
        if derived::is_timed(round) {
            let LaneTimes { scan, rearm, encode, moving, throttled, idle } = round.lanes;
            let times = [round.sync, scan, rearm, encode, moving, throttled, idle].map(units::time);
            lanes.row([number.as_str()].into_iter().chain(times.iter().map(String::as_str)));
        }
    }
    let lanes = match lanes.finish() {
        none if none.is_empty() => "<p>This source does not report the times of its rounds. Start, duration and size \
                                    of each round are therefore known only to about 0.1 s, the interval of the \
                                    queries. Rates of rounds and times of lanes are not measured.</p>\n"
            .to_owned(),
        lanes => format!("<h2>Time of lanes in each round, on average</h2>\n{lanes}"),
    };
    format!("<section>\n<h2>Rounds</h2>\n{}{lanes}</section>\n", sent.finish())
}

/// A table of names and values.
pub fn figures(rows: &[(String, String)]) -> String {
    let mut html = String::from("<section>\n<h2>Statistics</h2>\n<table class=\"pairs\">\n<tbody>\n");
    for (name, value) in rows {
        let _ = writeln!(html, "<tr><th>{}</th><td>{}</td></tr>", escape(name), escape(value));
    }
    html.push_str("</tbody>\n</table>\n</section>\n");
    html
}
