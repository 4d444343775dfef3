//! The section of a postcopy: page faults over time, durations of waits for pages, and each channel's pages.
//! And the section of lost connections, in precopy and in postcopy.

use std::time::Duration;

use sterna::Statistics;
use sterna::stats::{FaultSeries, Latencies, PostcopyStatistics};

use super::axis::Axis;
use super::keys::keys;
use super::layout::{self, FOOT, LEFT, RIGHT, WIDTH, x};
use super::series;
use super::svg::Svg;
use super::table::Table;
use crate::record::Record;
use crate::units;

const TOP: f64 = 34.0;
const HEIGHT: f64 = 120.0;
/// Approximate number of labels below a histogram.
const LABELS: usize = 8;
/// Maximum width of a bar.
const WIDEST: f64 = 90.0;

/// The section of a postcopy; empty without connection.
pub fn section(record: &Record) -> String {
    let Some(postcopy) = &record.statistics.postcopy else { return String::new() };
    let mut html = String::from("<section>\n<h2>Postcopy</h2>\n");
    let times = record.arrival.as_ref().and_then(|arrival| arrival.times.as_ref());
    html.push_str(&over_time(&record.statistics, &postcopy.faults));
    html.push_str(&histogram("Answered by the source", &postcopy.answers));
    if let Some(times) = times {
        html.push_str(&histogram("Waited for at the destination", &times.latencies));
    }
    if !html.contains("<svg") {
        html.push_str("<p>Page faults over time and their latencies: not measured.</p>\n");
    }
    html.push_str(&channels(postcopy));
    html.push_str("</section>\n");
    html
}

/// The section of lost connections; empty if there was none.
pub fn losses(statistics: &Statistics) -> String {
    let mut table =
        Table::new(&["in", "lost at", "without connection", "guest stopped", "sent again", "why"])
            .with_words(5);
    let later = statistics.postcopy.iter().flat_map(series::pauses);
    let all = statistics.reconnections.iter().map(|lost| ("precopy", lost));
    for (when, lost) in all.chain(later.map(|lost| ("postcopy", lost))) {
        table.row([
            when,
            &units::time(lost.at),
            &units::time(lost.took),
            &lost.stood.map_or("–".to_owned(), units::time),
            &units::bytes(lost.resent_bytes),
            &lost.why,
        ]);
    }
    let table = table.finish();
    if table.is_empty() {
        return table;
    }
    let earlier = match statistics.earlier_reconnections.count {
        0 => String::new(),
        count => format!("<p>{} earlier losses in precopy are not listed.</p>\n", units::count(count)),
    };
    format!("<section>\n<h2>Lost connections</h2>\n{earlier}{table}</section>\n")
}

/// A chart of page faults from the switch until the last page arrived, with both axes.
fn over_time(figures: &Statistics, faults: &FaultSeries) -> String {
    let most = faults.counts.iter().copied().max().unwrap_or(0);
    if most == 0 {
        return String::new();
    }
    // A record's values may be arbitrary, so the arithmetic saturates.
    let at = |part: usize| faults.began.saturating_add(faults.part.saturating_mul(part as u32)).as_secs_f64();
    let sent = figures.postcopy.as_ref().and_then(|postcopy| postcopy.all_sent);
    let end = sent.map_or(0.0, |sent| sent.as_secs_f64()).max(at(faults.counts.len()));
    let (time, axis) = (Axis::times(faults.began.as_secs_f64(), end), Axis::count(most));
    let title = format!("Page faults over time, in each {}", units::time(faults.part));
    let base = TOP + HEIGHT;
    let mut svg = Svg::new(WIDTH, base + FOOT, &title);
    layout::title(&mut svg, TOP, &title);
    let outages = series::outages(figures);
    layout::outages(&mut svg, &outages, &time, (TOP, base));
    layout::left_axis(&mut svg, &axis, (TOP, HEIGHT));
    for (part, count) in faults.counts.iter().enumerate() {
        let (left, right) = (x(&time, at(part)), x(&time, at(part + 1)));
        let height = axis.at(*count as f64) * HEIGHT;
        let tip = format!(
            "{} page faults from {} to {}",
            units::count(*count),
            units::seconds(at(part)),
            units::seconds(at(part + 1))
        );
        svg.rect("part p0", left, base - height, (right - left - 1.0).max(0.75), height, &tip);
    }
    layout::time_axis(&mut svg, &time, base, "time since the migration began");
    let shown = layout::mark_keys(figures).into_iter().filter(|(class, _)| *class == "outage");
    keys(shown) + &svg.finish()
}

/// A histogram of waits, with both axes; empty without waits.
fn histogram(what: &str, latencies: &Latencies) -> String {
    let most = latencies.buckets.iter().map(|(count, _)| *count).max().unwrap_or(0);
    if most == 0 {
        return String::new();
    }
    let title = format!(
        "{what}: p50 {}, p99 {}, longest {}",
        units::time(latencies.p50),
        units::time(latencies.p99),
        units::time(latencies.longest)
    );
    let (axis, base) = (Axis::count(most), TOP + HEIGHT);
    let mut svg = Svg::new(WIDTH, base + FOOT, &title);
    layout::title(&mut svg, TOP, &title);
    layout::left_axis(&mut svg, &axis, (TOP, HEIGHT));
    let bars = latencies.buckets.len();
    let width = ((RIGHT - LEFT) / bars as f64).min(WIDEST);
    let labels = bars.div_ceil(LABELS);
    for (index, (count, bound)) in latencies.buckets.iter().enumerate() {
        let height = axis.at(*count as f64) * HEIGHT;
        let (left, tip) =
            (LEFT + index as f64 * width, format!("{} within {}", units::count(*count), units::time(*bound)));
        svg.rect("part p0", left, base - height, (width - 1.0).max(0.75), height, &tip);
        if index % labels == 0 {
            label(&mut svg, left + width, base, index / labels, *bound);
        }
    }
    svg.text("x-label", (LEFT + RIGHT) / 2.0, base + 50.0, "waited for at most");
    svg.finish()
}

/// Draws the label of the bar that ends at `x`: its longest wait.
fn label(svg: &mut Svg, x: f64, base: f64, index: usize, bound: Duration) {
    svg.line("tick", x, base, x, base + 5.0);
    let class = if index % 2 == 1 { "x-label minor" } else { "x-label" };
    svg.text(class, x, base + 24.0, &units::time(bound));
}

fn channels(postcopy: &PostcopyStatistics) -> String {
    let mut table = Table::new(&["channel", "background pages", "requested pages", "sent"]);
    for channel in &postcopy.channels {
        table.row([
            channel.name.as_str(),
            &units::count(channel.background_pages),
            &units::count(channel.requested_pages),
            &units::bytes(channel.sent_bytes),
        ]);
    }
    table.finish()
}

#[cfg(test)]
mod tests {
    use sterna::Reconnection;

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

        let html = section(&record) + &losses(&record.statistics);

        // Page faults occur in three parts of the time, and each histogram has two buckets.
        assert_eq!(html.matches("<rect class=\"part p0\"").count(), 3 + 2 + 2, "{html}");
        for words in [
            "700 page faults from 3.19 s to 3.20 s",
            "Answered by the source: p50 120 µs, p99 900 µs",
            "Waited for at the destination: p50 400 µs, p99 2.00 ms",
        ] {
            assert!(html.contains(words), "{words} is not in {html}");
        }
        let cells = samples::cells(&html);
        for words in [
            "|&lt;b&gt;|129\u{202f}872|0|".to_owned(),
            "|precopy|0 s|0 s|–|0 bytes|before|".to_owned(),
            "|postcopy|4.50 s|2.00 s|–|512 KiB|&lt;script&gt;|".to_owned(),
        ] {
            assert!(cells.contains(&words), "{words} is not in {cells}");
        }
    }

    #[test]
    fn section_is_left_out_of_a_precopy_and_has_no_picture_of_nothing() {
        let mut record = samples::record();
        assert!(section(&record).is_empty() && losses(&record.statistics).is_empty());
        record.statistics.postcopy = Some(PostcopyStatistics::default());

        let html = section(&record);

        assert!(!html.contains("<svg") && !html.contains("<table") && !html.contains("NaN"), "{html}");
        assert!(html.contains("not measured"), "{html}");
    }

    /// The maximum is 700 faults in 10 ms. The switch is at 3.19 s and the last page arrives at 5.7 s.
    #[test]
    fn page_faults_over_time_have_both_axes_and_the_outages() {
        let record = samples::record_of_postcopy();

        let html = over_time(&record.statistics, &record.statistics.postcopy.as_ref().unwrap().faults);

        let labels = |class: &str| -> Vec<String> {
            let begin = format!("<text class=\"{class}\"");
            html.match_indices(&begin)
                .map(|(at, _)| {
                    let text = &html[at..][html[at..].find('>').unwrap() + 1..];
                    text[..text.find('<').unwrap()].to_owned()
                })
                .collect()
        };
        assert_eq!(labels("y-label"), ["0", "500", "1\u{202f}000"]);
        assert_eq!(labels("x-label minor"), ["4.0 s", "5.0 s"]);
        assert_eq!(labels("x-label"), ["3.5 s", "4.5 s", "5.5 s", "time since the migration began"]);
        assert!(
            html.contains("in each 10.0 ms") && html.contains("time since the migration began"),
            "{html}"
        );
        assert_eq!(html.matches("<rect class=\"outage\"").count(), 2, "{html}");
        // The bar of 700 is 0.7 of the axis high.
        assert!(html.contains(&format!("height=\"{:.2}\"", HEIGHT * 0.7)), "{html}");
    }

    #[test]
    fn histogram_has_both_axes() {
        let record = samples::record_of_postcopy();

        let html = histogram("Answered", &record.statistics.postcopy.as_ref().unwrap().answers);

        assert!(html.matches("class=\"y-label\"").count() >= 3, "{html}");
        for label in [">120 µs<", ">1.00 ms<", ">waited for at most<"] {
            assert!(html.contains(label), "{label} is not in {html}");
        }
    }
}
