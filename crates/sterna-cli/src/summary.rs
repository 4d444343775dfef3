//! The closing table: one migration in a dozen lines.

use comfy_table::{Cell, CellAlignment, Table, presets};
use sterna::forecast::Range;

use crate::figures::{Figures, LaneTimes, Stream};
use crate::plan::Plan;
use crate::record::Record;
use crate::units::{self, PAGE_BYTES};

/// Name and value of everything worth a line, in reading order. What is not known is left out.
pub fn rows(record: &Record) -> Vec<(String, String)> {
    let figures = &record.statistics;
    let mut rows: Vec<(String, String)> = Vec::new();
    let mut row = |name: &str, value: String| rows.push((name.to_owned(), value));
    row("status", figures.status.clone());
    if let Some(machine) = &record.machine {
        row("machine", machine.clone());
    }
    row("guest RAM", units::bytes(figures.ram_total_bytes));
    if let Some(plan) = &record.forecast {
        row("forecast", foretold(plan));
    }
    row(
        "total time",
        format!("{} ({} setup)", units::seconds(figures.total_time), units::seconds(figures.setup_time)),
    );
    if let Some(downtime) = figures.downtime {
        row("downtime", units::seconds(downtime));
    }
    if let Some(guest) = &record.guest {
        let value = format!(
            "{} (longest gap in its heartbeat, ± {})",
            units::seconds(guest.downtime_seconds),
            units::seconds(guest.resolution_seconds)
        );
        row("downtime seen by the guest", value);
    }
    row("rounds", figures.rounds.len().max(figures.rounds_begun as usize).to_string());
    row("transferred", units::bytes(figures.transferred_bytes));
    if let Some(bandwidth) = figures.moving_bandwidth() {
        row("bandwidth while moving", units::rate(bandwidth));
    }
    row("dirty rate, highest", units::rate(figures.most_dirty_rate()));
    row("sync time", units::seconds(figures.sync_seconds()));
    if let Some(shares) = lane_shares(figures) {
        row("lanes while the guest ran", shares);
    }
    let pages = format!(
        "{} normal, {} zero ({} never touched)",
        units::count(figures.normal_pages),
        units::count(figures.zero_pages),
        units::count(figures.absent_pages)
    );
    row("pages sent", pages);
    row("channels", figures.channels.to_string());
    if let Some(devices) = devices(figures) {
        row("devices' state", devices);
    }
    if let Some(cpu) = &record.cpu {
        let sent = ((figures.normal_pages + figures.zero_pages) * PAGE_BYTES) as f64 / f64::from(1u32 << 30);
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

/// The forecast in a line.
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

/// Large state of devices in a line.
fn devices(figures: &Figures) -> Option<String> {
    let slowest = figures.streams.iter().max_by(|a, b| a.took.total_cmp(&b.took))?;
    let sum = |of: fn(&Stream) -> u64| units::bytes(figures.streams.iter().map(of).sum());
    Some(format!(
        "{} in {}, {} while the guest ran; slowest behind the stop: {:?} with {}",
        sum(|stream| stream.bytes),
        match figures.streams.len() {
            1 => "one device".to_owned(),
            count => format!("{count} devices"),
        },
        sum(|stream| stream.running_bytes),
        slowest.name,
        units::seconds(slowest.took)
    ))
}

/// What lanes did with their time, in percent.
fn lane_shares(figures: &Figures) -> Option<String> {
    let LaneTimes { scan, rearm, encode, moving, throttled, idle } = figures.lane_seconds();
    let all = scan + rearm + encode + moving + throttled + idle;
    let shares = [
        ("moving", moving),
        ("scan", scan),
        ("re-arm", rearm),
        ("encode", encode),
        ("held back", throttled),
        ("idle", idle),
    ];
    let words = shares.map(|(name, seconds)| format!("{name} {:.1} %", seconds / all * 100.0));
    (all > 0.0).then(|| words.join(", "))
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
            "bandwidth while moving",
            "dirty rate",
            "sync time",
            "100 MiB in one device, 60.0 MiB while the guest ran; slowest behind the stop: \"vfio-user/0\" with 30.0 ms",
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
    fn rows_of_nothing_leave_out_what_is_not_known() {
        let rows = rows(&Record::new("", "", Figures::default()));

        assert!(rows.iter().all(|(name, _)| !name.contains("downtime") && name != "check"));
    }
}
