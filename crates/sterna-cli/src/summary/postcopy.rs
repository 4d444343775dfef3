//! The rows of a postcopy.

use sterna::stats::{IncomingPostcopy, Latencies, PostcopyStatistics};

use crate::record::Record;
use crate::units;

/// Name and value of each row; none if there was no postcopy.
pub(super) fn rows(record: &Record) -> Vec<(&'static str, String)> {
    let Some(postcopy) = &record.statistics.postcopy else { return Vec::new() };
    let mut rows = vec![("postcopy", course(postcopy))];
    rows.push(("page faults", faults(record, postcopy)));
    let channels: Vec<_> = postcopy.channels.iter().map(channel).collect();
    if !channels.is_empty() {
        rows.push(("channels in postcopy", channels.join("; ")));
    }
    if postcopy.recoveries > 0 || postcopy.paused.is_some() {
        rows.push(("paused in postcopy", pauses(postcopy)));
    }
    rows
}

fn course(postcopy: &PostcopyStatistics) -> String {
    let last = match postcopy.all_sent {
        Some(sent) => format!("last page sent {} later", units::time(sent.saturating_sub(postcopy.at))),
        None => "not all were sent".to_owned(),
    };
    format!(
        "switch after {}, {} missing; {last}",
        units::time(postcopy.at),
        units::bytes(postcopy.missing_bytes)
    )
}

fn faults(record: &Record, postcopy: &PostcopyStatistics) -> String {
    let mut text = units::count(record.statistics.postcopy_requests);
    if postcopy.answers.count > 0 {
        text += &format!("; answered by the source within {}", shares(&postcopy.answers));
    }
    let times = record.arrival.as_ref().and_then(|arrival: &IncomingPostcopy| arrival.times.as_ref());
    if let Some(times) = times.filter(|times| times.latencies.count > 0) {
        text += &format!("; the destination waited {}", shares(&times.latencies));
    }
    text
}

fn shares(latencies: &Latencies) -> String {
    format!("{} (p50), {} (p99)", units::time(latencies.p50), units::time(latencies.p99))
}

fn channel(channel: &sterna::stats::PostcopyChannel) -> String {
    let pages = [(channel.background_pages, "in the background"), (channel.requested_pages, "requested")];
    let pages = pages.into_iter().filter(|(count, _)| *count > 0);
    let pages: Vec<_> = pages.map(|(count, what)| format!("{} pages {what}", units::count(count))).collect();
    format!("{}: {} ({})", channel.name, pages.join(", "), units::bytes(channel.sent_bytes))
}

fn pauses(postcopy: &PostcopyStatistics) -> String {
    let all = || postcopy.pauses.iter().chain(&postcopy.paused);
    let again = all().fold(0, |sum: u64, pause| sum.saturating_add(pause.resent_bytes));
    let now = postcopy.paused.as_ref().map(|paused| paused.took).unwrap_or_default();
    let count = postcopy.recoveries.saturating_add(u64::from(postcopy.paused.is_some()));
    let mut text = format!(
        "{} for {}, {} of pages sent again",
        if count == 1 { "once".to_owned() } else { format!("{} times", units::count(count)) },
        units::time(postcopy.paused_time.saturating_add(now)),
        units::bytes(again)
    );
    if let Some(last) = all().last() {
        text += &format!("; the last: {}", last.why);
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sterna::Statistics;

    use super::*;
    use crate::samples;

    fn line(rows: &[(&str, String)], name: &str) -> String {
        rows.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone()).unwrap_or_default()
    }

    #[test]
    fn rows_say_when_the_switch_was_how_long_was_waited_and_which_channel_brought_what() {
        let rows = rows(&samples::record_of_postcopy());

        for (name, words) in [
            ("postcopy", "switch after 3.20 s, 512 MiB missing; last page sent 2.50 s later"),
            ("page faults", "answered by the source within 120 µs (p50), 900 µs (p99)"),
            ("page faults", "the destination waited 400 µs (p50), 2.00 ms (p99)"),
            ("channels in postcopy", "preempt: 1\u{202f}200 pages requested (4.70 MiB); multifd 0: "),
            ("paused in postcopy", "2 times for 3.00 s, 1.00 MiB of pages sent again; the last: cut"),
        ] {
            assert!(line(&rows, name).contains(words), "{words:?} is not in {rows:#?}");
        }
    }

    #[test]
    fn rows_of_one_that_is_paused_say_so_and_those_of_a_precopy_nothing() {
        let mut record = samples::record_of_postcopy();
        let postcopy = record.statistics.postcopy.as_mut().unwrap();
        postcopy.paused = postcopy.pauses.pop();
        postcopy.pauses.clear();
        (postcopy.recoveries, postcopy.paused_time, postcopy.all_sent) = (0, Duration::ZERO, None);

        let told = rows(&record);

        assert!(line(&told, "paused in postcopy").starts_with("once for 2.00 s"), "{told:?}");
        assert!(line(&told, "postcopy").ends_with("not all were sent"), "{told:?}");
        assert!(rows(&Record::new("", "", Statistics::default())).is_empty());
    }
}
