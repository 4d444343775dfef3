//! The tables for `benches/RESULTS.md`.

use crate::faults::Row;

const HEAD: [&str; 13] = [
    "side",
    "link, MB/s",
    "channels",
    "faults",
    "fault, µs: p50 / p99",
    "`postcopy-latency`, µs",
    "downtime, ms",
    "switch to last page, s",
    "MB/s",
    "plain copy, MB/s",
    "round trip, µs",
    "guest's pages a second",
    "before the move",
];

/// Heading lines of the table.
pub(crate) fn head() -> String {
    format!("{}\n{}\n", line(&HEAD.map(str::to_owned)), line(&HEAD.map(|_| "---".to_owned())))
}

/// One line of the table.
pub(crate) fn row(row: &Row) -> String {
    line(&[
        row.side.word().to_owned(),
        row.link.map_or_else(|| "–".to_owned(), |link| link.to_string()),
        row.channels.to_string(),
        row.faults.to_string(),
        format!("{:.0} / {:.0}", row.p50 * 1e6, row.p99 * 1e6),
        row.said.map_or_else(|| "–".to_owned(), |said| format!("{:.0}", said * 1e6)),
        format!("{:.1}", row.downtime * 1e3),
        format!("{:.2}", row.until_last_page),
        format!("{:.0}", row.rate / 1e6),
        format!("{:.0}", row.raw.bytes_per_second / 1e6),
        format!("{:.0}", row.raw.round_trip.as_secs_f64() * 1e6),
        format!("{:.0}", row.work),
        format!("{:.0}", row.work_before),
    ])
}

fn line(cells: &[String]) -> String {
    format!("| {} |", cells.join(" | "))
}
