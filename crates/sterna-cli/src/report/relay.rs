//! The page of a session of `sterna relay`: rates and remaining RAM over time, and what happened.

use super::axis::Axis;
use super::keys::keys;
use super::layout::{self, FOOT, GAP, WIDTH, x};
use super::svg::{Svg, escape};
use super::table::Table;
use super::{document, tables};
use crate::relay_record::{Part, RelayRecord};
use crate::units;

const TOP: f64 = 32.0;
const CHART: f64 = 120.0;

/// The complete HTML page.
pub fn page(record: &RelayRecord) -> String {
    let mut body = head(record);
    body.push_str("<section>\n<h2>Course</h2>\n");
    body.push_str(&course(record));
    body.push_str("</section>\n");
    body.push_str(&changes(record));
    body.push_str(&tables::figures(&rows(record)));
    document(&format!("Relayed migration – route {}", record.route), &body)
}

fn head(record: &RelayRecord) -> String {
    let peer = record.peer.as_deref().unwrap_or("not reached");
    let html = format!(
        "<header>\n<h1>Relayed migration</h1>\n<p class=\"way\">route {}, relay of the {} → {} <span class=\"status {}\">{}</span></p>\n\
         <p class=\"end\">{}</p>\n</header>\n",
        escape(&record.route),
        escape(&record.role),
        escape(peer),
        if record.in_order { "good" } else { "bad" },
        if record.in_order { "ended in order" } else { "broken" },
        escape(&record.end),
    );
    let bytes = |value: Option<u64>| value.map_or("unknown".to_owned(), units::bytes);
    html + &tables::tiles(&[
        ("guest RAM", bytes(record.ram_bytes)),
        ("passed", units::bytes(record.processed_bytes)),
        ("time", units::seconds(record.total_seconds)),
        ("downtime in the stream", record.downtime_seconds.map_or("not seen".to_owned(), units::seconds)),
        ("compression", format!("{:.2} to 1", record.compression_ratio())),
        ("reconnections", units::count(record.reconnections)),
    ])
}

/// Name and value of each row of the table.
fn rows(record: &RelayRecord) -> Vec<(String, String)> {
    let rate = record.processed_bytes as f64 / record.total_seconds.max(1e-6);
    let rows = [
        ("session", record.session.clone()),
        ("last phase", record.phase.clone()),
        ("rounds", record.rounds.to_string()),
        ("total time", units::seconds(record.total_seconds)),
        ("from the source's VMM", units::bytes(record.processed_bytes)),
        ("to the source's VMM", units::bytes(record.answered_bytes)),
        ("mean rate", units::rate(rate)),
        ("sent by this relay, before compression", units::bytes(record.sent_bytes)),
        ("sent by this relay", units::bytes(record.sent_payload_bytes)),
        ("of these, sent again", units::bytes(record.resent_bytes)),
        ("connections between the relays that were lost", units::count(record.lost_carriers)),
    ];
    rows.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn changes(record: &RelayRecord) -> String {
    let mut table = Table::new(&["at", "what"]).with_words(1);
    for change in &record.changes {
        table.row([units::seconds(change.at_seconds).as_str(), &change.what]);
    }
    match table.finish() {
        none if none.is_empty() => none,
        table => format!("<section>\n<h2>Phases and connections</h2>\n{table}</section>\n"),
    }
}

fn course(record: &RelayRecord) -> String {
    if record.parts.is_empty() {
        return "<p>The record contains no measurement of the session.</p>\n".to_owned();
    }
    type Value<'a> = &'a dyn Fn(&Part) -> Option<f64>;
    let rate: Value<'_> =
        &|part| (part.took_seconds > 0.0).then(|| part.processed_bytes as f64 / part.took_seconds);
    let all: [(&str, &str, &str, Value<'_>); 3] = [
        ("Bytes from the source's VMM", "sent-line", "/s", rate),
        ("RAM that still has to pass", "left-line", "", &|part| {
            part.remaining_bytes.map(|value| value as f64)
        }),
        ("Dirty rate that the stream shows", "dirty", "/s", &|part| {
            part.dirty_rate_bytes.map(|value| value as f64)
        }),
    ];
    let charts: Vec<_> = all
        .into_iter()
        .map(|(title, class, per, of)| (title, class, per, record.parts.iter().map(of).collect::<Vec<_>>()))
        .filter(|(.., values)| values.iter().flatten().any(|value| *value > 0.0))
        .collect();
    if charts.is_empty() {
        return "<p>No byte has passed in this session.</p>\n".to_owned();
    }
    let time = Axis::time(record.parts.iter().map(end).fold(record.total_seconds, f64::max));
    let top = |index: usize| TOP + index as f64 * (CHART + GAP);
    let bottom = top(charts.len()) - GAP;
    let mut svg = Svg::new(WIDTH, bottom + FOOT, "Rate, remaining RAM and dirty rate over time");
    for (index, (title, class, per, values)) in charts.iter().enumerate() {
        let top = top(index);
        let axis = Axis::bytes(values.iter().flatten().copied().fold(0.0, f64::max), per);
        layout::left_axis(&mut svg, &axis, (top, CHART));
        layout::title(&mut svg, top, title);
        let value = |(part, value): (&Part, &Option<f64>)| {
            let y = value.map(|value| top + CHART * (1.0 - axis.at(value)));
            (x(&time, part.at_seconds), x(&time, end(part)), y)
        };
        layout::steps(&mut svg, class, record.parts.iter().zip(values).map(value));
    }
    for part in &record.parts {
        let (left, right) = (x(&time, part.at_seconds), x(&time, end(part)));
        let class = if part.is_lost { "outage" } else { "hit" };
        svg.rect(class, left, top(0), right - left, bottom - top(0), &tip(part));
    }
    layout::time_axis(&mut svg, &time, bottom, "time since the session began");
    let is_lost = record.parts.iter().any(|part| part.is_lost);
    keys(is_lost.then(|| ("outage", "no connection between the relays".to_owned()))) + &svg.finish()
}

fn end(part: &Part) -> f64 {
    part.at_seconds + part.took_seconds
}

fn tip(part: &Part) -> String {
    let mut text = format!(
        "{} to {}\n{} passed",
        units::seconds(part.at_seconds),
        units::seconds(end(part)),
        units::bytes(part.processed_bytes)
    );
    if let Some(remaining) = part.remaining_bytes {
        text += &format!("\n{} remaining", units::bytes(remaining));
    }
    if part.is_lost {
        text += "\nno connection between the relays";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn page_shows_the_course_its_outage_and_each_change() {
        let record = samples::relay_record();

        let page = page(&record);

        for words in [
            "<h1>Relayed migration</h1>",
            "RAM that still has to pass",
            "class=\"outage\"",
            "no connection to the other relay: it &lt;broke&gt;",
            "2.00 to 1",
        ] {
            assert!(page.contains(words), "{words} is not in {page}");
        }
    }

    #[test]
    fn page_of_a_session_without_bytes_has_no_picture() {
        let record = RelayRecord { parts: Vec::new(), ..samples::relay_record() };

        assert!(!page(&record).contains("<svg"));
    }
}
