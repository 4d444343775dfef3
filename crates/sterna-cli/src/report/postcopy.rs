//! What a postcopy did: page faults over time, how long pages were waited for, what each channel brought. And lost connections,
//! in precopy and in postcopy.

use std::fmt::Write;
use std::time::Duration;

use sterna::Reconnection;
use sterna::stats::{FaultSeries, Latencies, PostcopyStatistics};

use super::svg::{Svg, escape};
use crate::record::Record;
use crate::units;

const WIDTH: f64 = 1080.0;
const LEFT: f64 = 24.0;
const RIGHT: f64 = 1056.0;
const TOP: f64 = 26.0;
const HEIGHT: f64 = 110.0;
/// A bar is no wider, however few there are.
const WIDEST: f64 = 40.0;

/// A section of a postcopy; nothing without one.
pub fn section(record: &Record) -> String {
    let Some(postcopy) = &record.statistics.postcopy else { return String::new() };
    let mut html = String::from("<section>\n<h2>Postcopy</h2>\n");
    html.push_str(&over_time(&postcopy.faults));
    html.push_str(&histogram("Answered by the source", &postcopy.answers));
    let times = record.arrival.as_ref().and_then(|arrival| arrival.times.as_ref());
    if let Some(times) = times {
        html.push_str(&histogram("Waited for at the destination", &times.latencies));
    }
    html.push_str(&channels(postcopy));
    html.push_str("</section>\n");
    html
}

/// A section of the connections that were lost; nothing if there was none.
pub fn losses(record: &Record) -> String {
    let statistics = &record.statistics;
    let later =
        statistics.postcopy.iter().flat_map(|postcopy| postcopy.pauses.iter().chain(&postcopy.paused));
    let rows: String =
        [("precopy", statistics.reconnections.iter().collect()), ("postcopy", later.collect())]
            .into_iter()
            .flat_map(|(when, all): (_, Vec<_>)| all.into_iter().map(move |lost| loss(when, lost)))
            .collect();
    if rows.is_empty() {
        return String::new();
    }
    let earlier = match statistics.earlier_reconnections.count {
        0 => String::new(),
        count => format!("<p>{} more in precopy were lost before these.</p>\n", units::count(count)),
    };
    format!(
        "<section>\n<h2>Lost connections</h2>\n{earlier}<div class=\"wide\">\n<table>\n<thead><tr><th>in</th><th>lost</th>\
         <th>without one</th><th>sent again</th><th>why</th></tr></thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n</section>\n"
    )
}

fn loss(when: &str, lost: &Reconnection) -> String {
    format!(
        "<tr><td>{when}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n",
        units::time(lost.at),
        units::time(lost.took),
        units::bytes(lost.resent_bytes),
        escape(&lost.why)
    )
}

fn over_time(faults: &FaultSeries) -> String {
    // A record's figures may be anything.
    let time = |part: usize| faults.began.saturating_add(faults.part.saturating_mul(part as u32));
    let bars = faults.counts.iter().enumerate().map(|(part, count)| {
        let tip = format!(
            "{} page faults from {} to {}",
            units::count(*count),
            units::time(time(part)),
            units::time(time(part + 1))
        );
        (*count, tip)
    });
    let ends = (faults.began, time(faults.counts.len()));
    bars_of("Page faults over time", bars.collect(), ends)
}

fn histogram(what: &str, latencies: &Latencies) -> String {
    let bars = latencies
        .buckets
        .iter()
        .map(|(count, most)| (*count, format!("{} within {}", units::count(*count), units::time(*most))));
    let title = format!(
        "{what}: p50 {}, p99 {}, longest {}",
        units::time(latencies.p50),
        units::time(latencies.p99),
        units::time(latencies.longest)
    );
    let bound = |bucket: Option<&(u64, Duration)>| bucket.map(|(_, most)| *most).unwrap_or_default();
    let ends = (bound(latencies.buckets.first()), bound(latencies.buckets.last()));
    bars_of(&title, bars.collect(), ends)
}

/// Bars side by side, each with its tip; nothing without any. `ends` stand below the first and the last.
fn bars_of(title: &str, bars: Vec<(u64, String)>, ends: (Duration, Duration)) -> String {
    let most = bars.iter().map(|(count, _)| *count).max().unwrap_or(0);
    if most == 0 {
        return String::new();
    }
    let mut svg = Svg::new(WIDTH, TOP + HEIGHT + 26.0, title);
    svg.text("title", LEFT, TOP - 10.0, title);
    let width = ((RIGHT - LEFT) / bars.len() as f64).min(WIDEST);
    let (base, last) = (TOP + HEIGHT, LEFT + width * bars.len() as f64);
    for (index, (count, tip)) in bars.iter().enumerate() {
        let height = *count as f64 / most as f64 * HEIGHT;
        svg.rect("part p0", LEFT + index as f64 * width, base - height, (width - 1.0).max(0.75), height, tip);
    }
    svg.line("base", LEFT, base, last, base);
    svg.text("key-label", LEFT, base + 18.0, &units::time(ends.0));
    svg.text("legend", last.max(LEFT + 160.0), base + 18.0, &units::time(ends.1));
    svg.finish()
}

fn channels(postcopy: &PostcopyStatistics) -> String {
    if postcopy.channels.is_empty() {
        return String::new();
    }
    let mut html = String::from(
        "<table>\n<thead><tr><th>channel</th><th>background pages</th><th>requested pages</th><th>sent</th></tr></thead>\n<tbody>\n",
    );
    for channel in &postcopy.channels {
        let _ = writeln!(
            html,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&channel.name),
            units::count(channel.background_pages),
            units::count(channel.requested_pages),
            units::bytes(channel.sent_bytes)
        );
    }
    html.push_str("</tbody>\n</table>\n");
    html
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn section_has_each_part_of_time_each_bucket_each_channel_and_each_loss() {
        let mut record = samples::record_of_postcopy();
        let postcopy = record.statistics.postcopy.as_mut().unwrap();
        postcopy.channels[1].name = "<b>".into();
        postcopy.pauses[1].why = "<script>".into();
        record.statistics.reconnections =
            vec![Reconnection { why: "before".into(), ..Reconnection::default() }];

        let html = section(&record) + &losses(&record);

        // Three parts of the time have page faults, and each histogram has two buckets.
        assert_eq!(html.matches("<rect class=\"part p0\"").count(), 3 + 2 + 2, "{html}");
        for words in [
            "700 page faults from 3.19 s to 3.20 s",
            "Answered by the source: p50 120 µs, p99 900 µs",
            "Waited for at the destination: p50 400 µs, p99 2.00 ms",
            "<td>&lt;b&gt;</td><td>129\u{202f}872</td>",
            "<td>precopy</td><td>0 s</td>",
            "<td>postcopy</td><td>4.50 s</td><td>2.00 s</td><td>512 KiB</td><td>&lt;script&gt;</td>",
        ] {
            assert!(html.contains(words), "{words} is not in {html}");
        }
    }

    #[test]
    fn section_is_left_out_of_a_precopy_and_has_no_picture_of_nothing() {
        let mut record = samples::record();
        assert!(section(&record).is_empty() && losses(&record).is_empty());
        record.statistics.postcopy = Some(PostcopyStatistics::default());

        let html = section(&record);

        assert!(!html.contains("<svg") && !html.contains("<table") && !html.contains("NaN"), "{html}");
    }
}
