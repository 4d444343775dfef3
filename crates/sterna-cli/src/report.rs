//! A record as one HTML page, of a migration, of a protection or of a relayed migration.
//! The page has a timeline as a picture, and the values as tables.
//!
//! The page is self-contained: styles and SVG are inline, there is no script. It follows the reader's light
//! or dark preference. Every mark in the pictures shows its values as a tooltip.
//!
//! - [`series`]: converts samples and rounds to lines over time.
//! - [`axis`]: ticks at round numbers, with units.
//! - [`svg`]: escaped elements.
//! - [`timeline`]: rounds as bands, above charts of sent, dirtied and remaining bytes.
//! - [`switchover`]: the downtime, split into its parts.
//! - [`postcopy`]: page faults, their latencies, channels; and lost connections.
//! - [`protection`]: the page of a protection.
//! - [`relay`]: the page of a relayed migration.
//! - [`layout`], [`keys`], [`table`]: shared by pictures, their legends and tables.
//! - [`tables`]: the values as tables.

pub(crate) mod axis;
mod document;
mod keys;
mod layout;
mod postcopy;
mod protection;
mod relay;
mod series;
pub(crate) mod svg;
mod switchover;
mod table;
mod tables;
mod timeline;

use crate::record::Record;
use crate::summary;
use crate::units;

use document::document;
pub use protection::page as protection_page;
pub use relay::page as relay_page;

/// The page of a migration.
pub fn page(record: &Record) -> String {
    let statistics = &record.statistics;
    let title = format!("Migration of {} – {}", units::bytes(statistics.ram_total_bytes), statistics.status);
    let mut body = tables::head(record);
    body.push_str("<section>\n<h2>Timeline</h2>\n");
    body.push_str(&timeline::picture(statistics));
    body.push_str("</section>\n");
    if !statistics.switchover.is_empty() {
        body.push_str("<section>\n<h2>Downtime</h2>\n");
        body.push_str(&switchover::picture(statistics));
        body.push_str("</section>\n");
    }
    body.push_str(&postcopy::section(record));
    body.push_str(&postcopy::losses(statistics));
    body.push_str(&tables::forecast(record));
    body.push_str(&tables::rounds(statistics));
    body.push_str(&tables::figures(&summary::rows(record)));
    document(&title, &body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;
    use sterna::Statistics;

    #[test]
    fn page_needs_nothing_from_elsewhere() {
        let page = page(&samples::record());

        for foreign in ["http:", "https:", "src=", "href=", "@import", "url(", "<script", "<link"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
    }

    #[test]
    fn page_shows_each_round_and_each_part_of_the_pause() {
        let record = samples::record();

        let page = page(&record);

        assert_eq!(page.matches("class=\"round ").count(), record.statistics.rounds.len());
        assert_eq!(page.matches("<rect class=\"part").count(), record.statistics.switchover.len());
        assert!(page.contains("48.0 ms"), "the downtime");
    }

    #[test]
    fn page_shows_the_forecast_beside_the_outcome() {
        let record = samples::record();

        let page = page(&record);

        assert!(page.contains("Forecast and outcome") && page.contains("off by"));
        let later = Record { forecast: record.forecast.clone(), ..samples::record_of_postcopy() };
        let rows = ["missing at the switch", "time until the last page", "\"figure\">page faults</td>"];
        assert!(rows.iter().all(|row| super::page(&later).contains(row) && !page.contains(row)));
        let without = super::page(&Record { forecast: None, ..record });
        assert!(!without.contains("Forecast and outcome"));
    }

    #[test]
    fn page_has_every_element_closed() {
        let page = page(&samples::record()) + &super::page(&samples::record_of_postcopy());

        for element in [
            "svg", "g", "section", "table", "text", "title", "rect", "path", "tr", "td", "th", "div", "p",
            "span", "i",
        ] {
            let opened =
                page.matches(&format!("<{element} ")).count() + page.matches(&format!("<{element}>")).count();
            let closed = page.matches(&format!("</{element}>")).count();
            assert_eq!(opened, closed, "{element}");
        }
    }

    /// Checks for styles that make a page wider than the window, or that hide content.
    #[test]
    fn page_has_no_width_of_its_own() {
        let style = include_str!("report/style.css");
        let pages = page(&samples::record()) + &page(&samples::record_of_postcopy());

        assert!(
            !style.contains("overflow-x")
                && !style.contains("overflow: hidden")
                && !style.contains("min-width:")
        );
        assert!(style.contains("svg { display: block; width: 100%; height: auto;"), "{style}");
        // Numbers do not break, so tables with many columns become blocks on a narrow page.
        let narrow = style.split("@media (max-width:").nth(1).expect("rules of a narrow page");
        assert!(
            narrow.contains(".rows tr { display: block;") && narrow.contains("attr(data-name)"),
            "{narrow}"
        );
        assert_eq!(pages.matches("<svg ").count(), pages.matches("<svg viewBox=").count());
        for table in pages.split("<table class=\"rows\">").skip(1) {
            let head = table.split("</thead>").next().unwrap();
            assert!(head.matches("<th").count() - 1 <= 8, "{head}");
        }
        let (tables, known) = (pages.matches("<table").count(), ["rows", "pairs"]);
        let of = |class: &&str| pages.matches(&format!("<table class=\"{class}\">")).count();
        assert_eq!(known.iter().map(of).sum::<usize>(), tables);
    }

    #[test]
    fn page_marks_outages_and_the_switch_to_postcopy() {
        let mut record = samples::record_of_postcopy();
        let lost = |at, took| sterna::Reconnection {
            at: std::time::Duration::from_millis(at),
            took: std::time::Duration::from_millis(took),
            why: "cut <here>".into(),
            ..sterna::Reconnection::default()
        };
        record.statistics.reconnections = vec![lost(900, 300)];
        record.statistics.rounds[0].unfinished = true;

        let whole = page(&record);

        let timeline = whole.split("<h2>Timeline</h2>").nth(1).unwrap().split("</section>").next().unwrap();
        // One in precopy, two in postcopy.
        assert_eq!(timeline.matches("<rect class=\"outage\"").count(), 3, "{timeline}");
        assert_eq!(timeline.matches("<line class=\"switch\"").count(), 1, "{timeline}");
        for words in [
            "no connection (3 times, 3.30 s in all)",
            "switch to postcopy (at 3.20 s)",
            "no connection for 300 ms, from 900 ms on\ncut &lt;here&gt;",
            "<rect class=\"round odd unfinished\"",
            "<rect class=\"round follow\"",
        ] {
            assert!(timeline.contains(words), "{words} is not in {timeline}");
        }
        let plain = page(&samples::record());
        assert!(!plain.contains("class=\"outage\"") && !plain.contains("class=\"switch\""));
    }

    #[test]
    fn page_says_what_was_not_measured() {
        let mut record = samples::record();
        let statistics = &mut record.statistics;
        for round in &mut statistics.rounds {
            round.lanes = sterna::LaneTimes::default();
            round.sync = std::time::Duration::ZERO;
        }
        statistics.dirty_pages_per_second = 0;
        statistics.samples.iter_mut().for_each(|sample| sample.dirty_pages_per_second = 0);

        let page = page(&record);

        assert!(page.contains("dirtied per second: not measured"), "{page}");
        assert!(!page.contains("<path class=\"dirty\""), "a line where nothing was measured");
        assert!(page.contains("<th>dirty rate, highest</th><td>not measured</td>"), "{page}");
        assert!(page.contains("of rounds and times of lanes are not measured"), "{page}");
    }

    /// Expected values, computed independently.
    /// Pages have 4100 bytes as sent. Bytes moved in 2.28 s of the 2.33 s after the setup.
    #[test]
    fn page_has_the_figures_of_a_record_whose_truth_is_known() {
        let page = page(&samples::record());

        for (value, name) in [
            ("2.35 s", "total time"),
            ("48.0 ms", "downtime"),
            ("1.95 GiB/s", "bandwidth while sending"),
            ("3", "rounds"),
        ] {
            let tile = format!("<div class=\"value\">{value}</div><div class=\"name\">{name}</div>");
            assert!(page.contains(&tile), "{tile}");
        }
        for (name, value) in [
            ("transferred", "4.38 GiB"),
            ("throughput, mean", "1.88 GiB/s"),
            // One sample has 57 800 dirty pages per second.
            ("dirty rate, highest", "226 MiB/s"),
            ("sync time", "11.0 ms"),
            ("channels", "2"),
        ] {
            let row = format!("<tr><th>{name}</th><td>{value}</td></tr>");
            assert!(page.contains(&row), "{row}");
        }
        let cells = samples::cells(&page);
        for row in [
            "|1|20.0 ms|1.70 s|1\u{202f}040\u{202f}000|3.97 GiB|2.34 GiB/s|96\u{202f}000|221 MiB/s|",
            "|2|1.72 s|560 ms|96\u{202f}000|375 MiB|678 MiB/s|29\u{202f}000|202 MiB/s|",
            "|3 (guest stopped)|2.28 s|31.0 ms|29\u{202f}000|113 MiB|3.69 GiB/s|0|0 bytes/s|",
            "|1|4.00 ms|0 s|0 s|0 s|1.70 s|0 s|4.00 ms|",
        ] {
            assert!(cells.contains(row), "{row} is not in {cells}");
        }
        for part in ["last pages – 31.0 ms (65 %)", "prepare: the destination loads – 9.00 ms (19 %)"] {
            assert!(page.contains(part), "{part}");
        }
    }

    #[test]
    fn page_escapes_what_a_peer_said() {
        let mut record = samples::record();
        record.statistics.error = Some("<script>alert(1)</script> & \"more\"".into());
        record.source = "<b>".into();

        let page = page(&record);

        assert!(!page.contains("<script") && !page.contains("<b>"));
    }

    #[test]
    fn page_of_a_migration_that_never_began_is_still_a_page() {
        let figures = Statistics {
            status: sterna::Status::Failed,
            error: Some("refused".into()),
            ..Statistics::default()
        };

        let page = page(&Record::new("a", "b", figures));

        assert!(page.contains("refused") && page.ends_with("</html>\n"));
        assert!(!page.contains("NaN") && !page.contains("inf"));
    }
}
