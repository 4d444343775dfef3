//! The tables for `benches/RESULTS.md`.

use crate::row::{Figures, Row, Spread};

const DIRTY: &str = "dirty, MiB";
const HEAD: [&str; 18] = [
    "pair",
    "channels",
    "mode",
    "load",
    "delay, ms",
    "checkpoints",
    "a second",
    "pause, ms: mean / p50 / p99 / p999",
    "transfer, ms: mean / p50 / p99",
    DIRTY,
    "bytes / dirty",
    "output delay, ms: p50 / p99",
    "guest's pages a second",
    "guest's gaps, ms: p50 / most",
    "plain copy, ms",
    "CPU ms each: primary / standby",
    "standby resident, MiB",
    "takeover, ms (decision)",
];

/// With fewer bytes, most of the sent data is devices and not pages.
const LEAST_BYTES: f64 = 65536.0;

/// Heading lines of the table.
pub(crate) fn head() -> String {
    format!("{}\n{}\n", line(&HEAD.map(str::to_owned)), line(&HEAD.map(|_| "---".to_owned())))
}

/// One line of the table.
pub(crate) fn row(row: &Row) -> String {
    let mut cells = vec![
        row.pair.word().to_owned(),
        row.channels.to_string(),
        row.mode.clone(),
        row.load.word().to_owned(),
        row.delay_ms.to_string(),
    ];
    match &row.cell {
        Some(of) => cells.extend(figures(of)),
        None => cells.extend(HEAD[5..HEAD.len() - 1].iter().map(|name| match (*name, row.came_bytes) {
            (DIRTY, Some(bytes)) => mib(bytes as f64),
            _ => "–".to_owned(),
        })),
    }
    let decision = match row.patience_ms() {
        Some(ms) => format!(" ({ms:.0})"),
        None if row.is_planned() => " (planned)".to_owned(),
        None => String::new(),
    };
    cells.push(or_dash(row.recovery, |times| format!("{:.1}{decision}", times.p50)));
    line(&cells)
}

fn figures(of: &Figures) -> Vec<String> {
    let two = |[one, other]: [f64; 2]| format!("{one:.1} / {other:.1}");
    let ratio = of.bytes_per_checkpoint.zip(of.dirty_bytes).filter(|(_, dirty)| *dirty >= LEAST_BYTES);
    let transfer = |times: Spread| format!("{:.2} / {:.2} / {:.2}", times.mean, times.p50, times.p99);
    let Spread { mean, p50, p99, p999 } = of.pause;
    vec![
        of.checkpoints.to_string(),
        format!("{:.1}", of.per_second),
        format!("{mean:.2} / {p50:.2} / {p99:.2} / {p999:.2}"),
        or_dash(of.transfer, transfer),
        or_dash(of.dirty_bytes, mib),
        or_dash(ratio, |(bytes, dirty)| format!("{:.2}", bytes / dirty)),
        or_dash(of.output_delay, two),
        or_dash(of.guest_rate, |rate| format!("{rate:.0}")),
        or_dash(of.guest_gap, two),
        or_dash(of.copy_ms, |ms| format!("{ms:.2}")),
        format!("{:.1} / {:.1}", of.primary_cpu_ms_each(), of.standby_cpu_ms_each()),
        (of.standby_resident_bytes >> 20).to_string(),
    ]
}

fn mib(bytes: f64) -> String {
    format!("{:.2}", bytes / 1048576.0)
}

fn or_dash<T>(value: Option<T>, text: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "–".to_owned(), text)
}

fn line(cells: &[String]) -> String {
    format!("| {} |", cells.join(" | "))
}
