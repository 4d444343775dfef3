//! A migration's record as one HTML page: its timeline as a picture, and the figures as tables.
//!
//! The page needs nothing but itself: styles and SVG are inline, there is no script, and it follows the
//! reader's light or dark preference. Every mark in the pictures carries its figures as a tooltip.
//!
//! - [`series`]: from samples and rounds to lines over time.
//! - [`axis`]: ticks at round numbers, with units.
//! - [`svg`]: escaped elements.
//! - [`timeline`]: rounds as bands above what was sent, dirtied and left.
//! - [`switchover`]: the pause, split into its parts.
//! - [`postcopy`]: page faults, their latencies, channels; and lost connections.
//! - [`tables`]: the same in figures.

pub(crate) mod axis;
mod postcopy;
mod series;
pub(crate) mod svg;
mod switchover;
mod tables;
mod timeline;

use std::fmt::Write;

use crate::record::Record;
use crate::units;

/// The whole page.
pub fn page(record: &Record) -> String {
    let mut page = String::with_capacity(64 << 10);
    let statistics = &record.statistics;
    let title = format!("Migration of {} – {}", units::bytes(statistics.ram_total_bytes), statistics.status);
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n<style>\n{}</style>\n</head>\n<body>\n<main>\n",
        svg::escape(&title),
        include_str!("report/style.css"),
    );
    page.push_str(&tables::head(record));
    page.push_str("<section>\n<h2>Timeline</h2>\n");
    page.push_str(&timeline::picture(statistics));
    page.push_str("</section>\n");
    if !statistics.switchover.is_empty() {
        page.push_str("<section>\n<h2>Downtime</h2>\n");
        page.push_str(&switchover::picture(statistics));
        page.push_str("</section>\n");
    }
    page.push_str(&postcopy::section(record));
    page.push_str(&postcopy::losses(record));
    page.push_str(&tables::forecast(record));
    page.push_str(&tables::rounds(statistics));
    page.push_str(&tables::figures(record));
    page.push_str("</main>\n</body>\n</html>\n");
    page
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
        assert_eq!(page.matches("class=\"part").count(), record.statistics.switchover.len());
        assert!(page.contains("48.0 ms"), "the downtime");
    }

    #[test]
    fn page_shows_the_forecast_beside_the_outcome() {
        let record = samples::record();

        let page = page(&record);

        assert!(page.contains("Forecast and outcome") && page.contains("off by"));
        let later = Record { forecast: record.forecast.clone(), ..samples::record_of_postcopy() };
        let rows = ["missing at the switch", "time until the last page", "page faults</td>"];
        assert!(rows.iter().all(|row| super::page(&later).contains(row) && !page.contains(row)));
        let without = super::page(&Record { forecast: None, ..record });
        assert!(!without.contains("Forecast and outcome"));
    }

    #[test]
    fn page_has_every_element_closed() {
        let page = page(&samples::record()) + &super::page(&samples::record_of_postcopy());

        for element in
            ["svg", "g", "section", "table", "text", "title", "rect", "path", "tr", "td", "th", "div"]
        {
            let opened =
                page.matches(&format!("<{element} ")).count() + page.matches(&format!("<{element}>")).count();
            let closed = page.matches(&format!("</{element}>")).count();
            assert_eq!(opened, closed, "{element}");
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
