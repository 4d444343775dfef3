//! The table at the end of a migration, in about a dozen lines.

mod postcopy;

use std::time::Duration;

use comfy_table::{Cell, CellAlignment, Table, presets};
use sterna::forecast::Range;
use sterna::{LaneTimes, RdmaStatistics, ReconnectionTotals, Statistics, StreamStatistics};

use crate::derived;
use crate::plan::Plan;
use crate::record::Record;
use crate::units::{self, PAGE_BYTES};

/// Name and value of each row, in reading order. Unknown values are left out.
pub fn rows(record: &Record) -> Vec<(String, String)> {
    let statistics = &record.statistics;
    let mut rows: Vec<(String, String)> = Vec::new();
    let mut row = |name: &str, value: String| rows.push((name.to_owned(), value));
    row("status", statistics.status.to_string());
    if let Some(why) = &record.unconfirmed {
        row("arrival", format!("not confirmed: {why}"));
    }
    if let Some(machine) = &record.machine {
        row("machine", machine.clone());
    }
    // The migration failed before RAM was counted. Except for the time, nothing was measured, and all values
    // would be shown as 0.
    if statistics.ram_total_bytes == 0 && statistics.transferred_bytes == 0 {
        if !statistics.total_time.is_zero() {
            row("total time", units::time(statistics.total_time));
        }
        return rows;
    }
    row("guest RAM", units::bytes(statistics.ram_total_bytes));
    if let Some(plan) = &record.forecast {
        row("forecast", foretold(plan));
    }
    row(
        "total time",
        format!("{} ({} setup)", units::time(statistics.total_time), units::time(statistics.setup_time)),
    );
    if let Some(downtime) = statistics.downtime {
        row("downtime", units::time(downtime));
    }
    if let Some(guest) = &record.guest {
        let value = format!(
            "{} (longest gap in its heartbeat, ± {})",
            units::seconds(guest.downtime_seconds),
            units::seconds(guest.resolution_seconds)
        );
        row("downtime seen by the guest", value);
    }
    row("rounds", rounds(statistics).to_string());
    row("transferred", units::bytes(statistics.transferred_bytes));
    if let Some(bandwidth) = derived::moving_bandwidth(statistics) {
        row("bandwidth while sending", units::rate(bandwidth));
    }
    if let Some(throughput) = derived::mean_throughput(statistics) {
        row("throughput, mean", units::rate(throughput));
    }
    row(
        "dirty rate, highest",
        derived::most_dirty_rate(statistics).map_or("not measured".into(), units::rate),
    );
    if let Some(time) = derived::sync_time(statistics) {
        row("sync time", units::time(time));
    }
    if let Some(shares) = lane_shares(statistics) {
        row("lanes while the guest ran", shares);
    }
    let count = |pages| units::count(pages);
    let absent = match statistics.absent_pages {
        0 => String::new(),
        pages => format!(" ({} never touched)", count(pages)),
    };
    let (normal, zero) = (count(statistics.normal_pages), count(statistics.zero_pages));
    row("pages sent", format!("{normal} normal, {zero} zero{absent}"));
    if statistics.free_pages > 0 {
        row("pages that the guest does not use", units::count(statistics.free_pages));
    }
    row("channels", statistics.channels.to_string());
    if !statistics.reconnections.is_empty() {
        row("reconnections", reconnections(statistics));
    }
    for (name, value) in postcopy::rows(record) {
        row(name, value);
    }
    if let Some(rdma) = &statistics.rdma {
        row("RDMA", of_rdma(rdma));
    }
    if let Some(devices) = devices(statistics) {
        row("devices' state", devices);
    }
    if let Some(cpu) = &record.cpu {
        let sent =
            ((statistics.normal_pages + statistics.zero_pages) * PAGE_BYTES) as f64 / f64::from(1u32 << 30);
        let mut value =
            format!("{:.2} source, {:.2} destination", cpu.source_seconds, cpu.destination_seconds);
        if sent > 0.0 {
            let each = (cpu.source_seconds + cpu.destination_seconds) / sent;
            value += &format!(" ({each:.2} per GiB of pages, guest included)");
        }
        row("CPU seconds", value);
    }
    if let Some(check) = &record.check {
        let verdict = if check.passed { "passed" } else { "FAILED" };
        row("check", format!("{verdict}: {}", check.summary));
    }
    rows
}

/// The number of rounds. A record may combine neighbouring rounds, so the list can be shorter.
pub fn rounds(statistics: &Statistics) -> u64 {
    let last = statistics.rounds.last().map_or(0, |round| round.number);
    last.max(statistics.rounds.len() as u64).max(statistics.rounds_begun)
}

/// The forecast as one line.
fn foretold(plan: &Plan) -> String {
    let Some(forecast) = plan.forecast.as_ref().filter(|forecast| forecast.convergent) else {
        return "would not converge".into();
    };
    let range = |range: &Range| {
        let shown = |figure: Option<f64>| figure.map_or("no end".into(), units::seconds);
        format!("{} ({} to {})", shown(range.expected), shown(range.low), shown(range.high))
    };
    format!("total time {}, downtime {}", range(&forecast.total_time), range(&forecast.downtime))
}

/// The rows as a table for a terminal.
pub fn table(record: &Record) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    for (name, value) in rows(record) {
        table.add_row([Cell::new(name).set_alignment(CellAlignment::Left), Cell::new(value)]);
    }
    let text = table.to_string();
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// The lost connections as one line.
fn reconnections(statistics: &Statistics) -> String {
    let ReconnectionTotals { count, took, stood, resent_bytes } = statistics.reconnection_totals();
    let mut text = format!(
        "{}; {} without a connection, {} of pages sent again",
        units::count(count),
        units::time(took),
        units::bytes(resent_bytes)
    );
    if !stood.is_zero() {
        text +=
            &format!("; the guest was stopped for {} in switchovers that were cancelled", units::time(stood));
    }
    text
}

/// The RDMA statistics as one line.
fn of_rdma(rdma: &RdmaStatistics) -> String {
    let mut text = format!(
        "{} in {} writes, {} in flight; registered: {} in {} calls at the source, {} in {} windows at the destination; {} \
         commands answered",
        units::bytes(rdma.written_bytes),
        units::count(rdma.writes),
        units::bytes(rdma.in_flight_bytes),
        units::bytes(rdma.pinned_bytes),
        units::count(rdma.registrations),
        units::bytes(rdma.destination_pinned_bytes),
        units::count(rdma.windows),
        units::count(rdma.exchanges),
    );
    if rdma.receiver_not_ready > 0 {
        text += &format!("; receiver not ready {} times", units::count(rdma.receiver_not_ready));
    }
    text
}

/// The large state of devices as one line.
fn devices(statistics: &Statistics) -> Option<String> {
    let slowest = statistics.streams.iter().max_by(|a, b| a.took.cmp(&b.took))?;
    let sum = |of: fn(&StreamStatistics) -> u64| units::bytes(statistics.streams.iter().map(of).sum());
    Some(format!(
        "{} in {}, {} while the guest ran; slowest after the stop: {:?} with {}",
        sum(|stream| stream.bytes),
        match statistics.streams.len() {
            1 => "one device".to_owned(),
            count => format!("{count} devices"),
        },
        sum(|stream| stream.running_bytes),
        slowest.name,
        units::time(slowest.took)
    ))
}

/// How lanes spent their time, in percent.
fn lane_shares(statistics: &Statistics) -> Option<String> {
    let LaneTimes { scan, rearm, encode, moving, throttled, idle } = derived::lane_times(statistics);
    let all = scan + rearm + encode + moving + throttled + idle;
    let shares = [
        ("moving", moving),
        ("scan", scan),
        ("re-arm", rearm),
        ("encode", encode),
        ("held back", throttled),
        ("idle", idle),
    ];
    let percent = |time: Duration| time.as_secs_f64() / all.as_secs_f64() * 100.0;
    (!all.is_zero()).then(|| shares.map(|(name, time)| format!("{name} {:.1} %", percent(time))).join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn table_of_a_demo_has_every_figure_that_it_promises() {
        let table = table(&samples::record());

        for name in [
            "total time",
            "downtime",
            "downtime seen by the guest",
            "rounds",
            "bandwidth while sending",
            "dirty rate",
            "sync time",
            "100 MiB in one device, 60.0 MiB while the guest ran; slowest after the stop: \"vfio-user/0\" with 30.0 ms",
            "idle",
            "normal",
            "zero",
            "CPU seconds",
            "check",
        ] {
            assert!(table.contains(name), "{name} is missing in\n{table}");
        }
    }

    #[test]
    fn rows_count_reconnections_and_the_time_without_a_connection() {
        let one = sterna::stats::Reconnection {
            took: Duration::from_millis(2300),
            resent_bytes: 3 << 20,
            ..Default::default()
        };
        let two = sterna::stats::Reconnection { stood: Some(Duration::from_millis(40)), ..one.clone() };
        let statistics = Statistics { reconnections: vec![one, two], ..samples::engine_statistics() };
        let earlier = ReconnectionTotals {
            count: 1000,
            took: Duration::from_millis(400),
            stood: Duration::from_millis(10),
            resent_bytes: 1 << 20,
        };
        let many = Statistics { earlier_reconnections: earlier, ..statistics.clone() };
        for (statistics, wanted) in [
            (statistics, ["2; 4.60 s without", "6.00 MiB of pages sent again", "was stopped for 40.0 ms"]),
            (
                many,
                ["1\u{202f}002; 5.00 s without", "7.00 MiB of pages sent again", "was stopped for 50.0 ms"],
            ),
        ] {
            let rows = rows(&Record::new("", "", statistics));

            let (_, text) = rows.into_iter().find(|(name, _)| name == "reconnections").expect("a row");
            for words in wanted {
                assert!(text.contains(words), "{words} in {text}");
            }
        }
    }

    #[test]
    fn rows_of_nothing_leave_out_what_is_not_known() {
        let rows = rows(&Record::new("", "", Statistics::default()));

        let names: Vec<_> = rows.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["status"]);
    }

    #[test]
    fn rows_of_a_migration_over_rdma_say_what_it_did_and_what_is_wrong() {
        let rdma = samples::rdma();
        let of = |rdma| {
            let statistics = Statistics { rdma: Some(rdma), ..samples::engine_statistics() };
            let rows = rows(&Record::new("", "", statistics));
            rows.into_iter().find(|(name, _)| name == "RDMA").expect("a row").1
        };

        let (right, wrong) = (of(rdma), of(RdmaStatistics { receiver_not_ready: 3, ..rdma }));

        for words in [
            "4.34 GiB in 4\u{202f}500 writes, 3.00 MiB in flight",
            "2.00 GiB in 12 calls at the source",
            "1.00 GiB in 11 windows at the destination",
            "16 commands answered",
        ] {
            assert!(right.contains(words), "{words} in {right}");
        }
        assert!(!right.contains("not ready") && wrong.contains("receiver not ready 3 times"), "{wrong}");
    }
}
