//! Compares measured values with the goals. All values are from the rows of one run.

use sterna_benches::goal::{Bound, Goal};
use sterna_benches::machines::Side;

use crate::faults::Row;
use crate::writer;

/// Minimum write rate that counts as four times the bandwidth. In multiples of the link's bandwidth.
const LEAST_WRITTEN: f64 = 3.6;

/// Goals for page faults and for the background pages.
pub(crate) fn of_faults(rows: &[Row]) -> Vec<Goal> {
    let ours = rows.iter().filter(|row| row.side == Side::Sterna);
    ours.flat_map(|row| {
        let like = |other: &&Row| (other.link, other.channels) == (row.link, row.channels);
        let qemu = rows.iter().filter(like).find(|row| row.side == Side::Qemu);
        qemu.map(|qemu| beside(row, qemu)).unwrap_or_default()
    })
    .collect()
}

fn beside(row: &Row, qemu: &Row) -> Vec<Goal> {
    let place = place(row);
    let micros = |ours: f64, theirs: f64| format!("{:.0} µs, QEMU {:.0}", ours * 1e6, theirs * 1e6);
    let megabytes = |rate: f64| rate / 1e6;
    let raw = row.raw.bytes_per_second;
    vec![
        Goal::of(
            &format!("fault, {place}: p50 against QEMU's"),
            row.p50 / qemu.p50,
            &micros(row.p50, qemu.p50),
            Bound::AtMost(0.5),
        ),
        Goal::of(
            &format!("fault, {place}: p99 against QEMU's"),
            row.p99 / qemu.p99,
            &micros(row.p99, qemu.p99),
            Bound::AtMost(0.5),
        ),
        Goal::of(
            &format!("bytes a second from the switch to the last page, {place}: against a plain copy"),
            row.rate / raw,
            &format!(
                "{:.0} of {:.0} MB/s; QEMU {:.2}",
                megabytes(row.rate),
                megabytes(raw),
                qemu.rate / qemu.raw.bytes_per_second
            ),
            Bound::AtLeast(0.9),
        ),
        Goal::of(
            &format!("the guest's pages a second in that time, {place}: against those under QEMU"),
            row.work / qemu.work,
            &format!("{:.0}, QEMU {:.0}", row.work, qemu.work),
            Bound::AtLeast(1.3),
        ),
    ]
}

/// Goals for a guest that writes faster than the link carries.
pub(crate) fn of_writers(rows: &[writer::Row]) -> Vec<Goal> {
    let mut goals = Vec::new();
    for row in rows {
        let (name, link) = (row.side.word(), row.link as f64 * 1e6);
        let is_wanted = row.side == Side::Sterna;
        goals.push(Goal {
            what: format!("{name}: a guest that writes {:.1} × the link", row.written / link),
            measured: format!(
                "{} of {} precopies end; postcopy does, {:.1} s after the switch",
                row.precopies_ended, row.moves, row.until_last_page
            ),
            goal: "at 4 × the link: precopy does not end, postcopy does".to_owned(),
            // On a busy machine, the guest may not reach this rate. The run then proves nothing.
            is_short: is_wanted
                && (row.precopies_ended > 0
                    || row.until_last_page.is_nan()
                    || row.written < LEAST_WRITTEN * link),
        });
        goals.push(Goal::of(
            &format!("{name}: its downtime against that of a guest that stands"),
            row.downtime / row.idle_downtime,
            &format!("{:.1} ms, {:.1}", row.downtime * 1e3, row.idle_downtime * 1e3),
            if is_wanted { Bound::AtMost(1.2) } else { Bound::Stated },
        ));
    }
    goals
}

fn place(row: &Row) -> String {
    let link = row.link.map_or_else(|| "no limit".to_owned(), |link| format!("{link} MB/s"));
    match row.channels {
        0 => link,
        channels => format!("{link}, multifd {channels}"),
    }
}
