//! Compares measured values with the goals. All values are from the rows of one run.

use sterna_benches::goal::{Bound, Goal, figure};

use crate::plan::{COPY, Load, Pair};
use crate::row::{Figures, Row};

/// Default limit of a standby's journal, in bytes.
const JOURNAL_BYTES: u64 = 1 << 30;
const MORE_BYTES: u64 = 64 << 20;
/// Minimum of bytes at which a pause is compared with a plain copy. Below, devices and threads dominate.
const LARGE_BYTES: f64 = 16.0 * 1048576.0;
/// Goals of takeovers, in milliseconds.
const STERNA_TAKEOVER: f64 = 100.0;
const QEMU_TAKEOVER: f64 = 300.0;

type Figure = fn(&Figures) -> f64;

/// A value, and the row that it is from.
type Value<'a> = (f64, &'a Row);

/// All goals that these rows can decide.
pub(crate) fn goals(rows: &[Row]) -> Vec<Goal> {
    let all = Rows(rows);
    let goals = [
        all.pauses_of_sterna(),
        all.pauses_of_a_qemu(),
        all.rates(),
        all.amounts(),
        all.delays_and_takeovers(),
    ];
    goals.into_iter().flatten().flatten().collect()
}

struct Rows<'a>(&'a [Row]);

impl<'a> Rows<'a> {
    fn pauses_of_sterna(&self) -> Vec<Option<Goal>> {
        let loaded = self.ratios(Pair::SternaSterna, is_load, |row, of| {
            Some(of.pause.p99 / least(self.qemus(row), |qemu| Some(qemu.pause.p99))?)
        });
        let idle = |figure: Figure| {
            self.ratios(Pair::SternaSterna, is_idle, move |row, of| {
                let mut plain = self.qemus(row).filter(|(row, _)| row.channels == 0);
                Some(figure(of) / figure(plain.next()?.1))
            })
        };
        let copied: fn(&Row) -> bool = |row| is_load(row) && row.mode == COPY;
        let copies = self.ratios(Pair::SternaSterna, copied, |_, of| {
            Some(of.pause.p50 / of.copy_ms.filter(|_| of.dirty_bytes >= Some(LARGE_BYTES))?)
        });
        vec![
            goal("Sterna→Sterna, load: p99 of the pause against QEMU's best", loaded, Bound::AtMost(0.5)),
            goal(
                "Sterna→Sterna, idle: mean of the pause against QEMU's, main channel",
                idle(|of| of.pause.mean),
                Bound::AtMost(1.0),
            ),
            goal("Sterna→Sterna, idle: p99, likewise", idle(|of| of.pause.p99), Bound::AtMost(1.0)),
            goal(
                "Sterna→Sterna, copied, 16 MiB or more: p50 of the pause against a plain copy of the pages",
                copies,
                Bound::AtMost(1.3),
            ),
        ]
    }

    fn pauses_of_a_qemu(&self) -> Vec<Option<Goal>> {
        let of = |figure: Figure, which: fn(&Row) -> bool| {
            self.ratios(Pair::QemuSterna, which, move |row, of| {
                let mut same = self.qemus(row).filter(|(qemu, _)| qemu.channels == row.channels);
                Some(figure(of) / figure(same.next()?.1))
            })
        };
        let mean: Figure = |of| of.pause.mean;
        let p99: Figure = |of| of.pause.p99;
        let against = "against QEMU→QEMU, same channels";
        vec![
            goal(
                &format!("QEMU→Sterna, idle: mean of the pause {against}"),
                of(mean, is_idle),
                Bound::AtMost(0.4),
            ),
            goal(
                &format!("QEMU→Sterna, load: mean of the pause {against}"),
                of(mean, is_load),
                Bound::AtMost(0.7),
            ),
            goal("QEMU→Sterna, idle: p99, likewise", of(p99, is_idle), Bound::Stated),
            goal("QEMU→Sterna, load: p99, likewise", of(p99, is_load), Bound::Stated),
        ]
    }

    fn rates(&self) -> Vec<Option<Goal>> {
        let at_10 = |which: fn(&Row) -> bool| move |row: &Row| row.delay_ms == 10.0 && which(row);
        let idle = |pair| self.ratios(pair, at_10(is_idle), |_, of| Some(of.per_second));
        let against = |pair, delay: f64| {
            let which = move |row: &Row| row.delay_ms == delay && is_load(row);
            self.ratios(pair, which, |row, of| {
                Some(of.per_second / most(self.qemus(row), |qemu| Some(qemu.per_second))?)
            })
        };
        let work = |pair| {
            let which = |row: &Row| row.delay_ms == 50.0 && row.load == Load::Middle;
            self.ratios(pair, which, |row, of| {
                Some(of.guest_rate? / most(self.qemus(row), |qemu| qemu.guest_rate)?)
            })
        };
        let (own, theirs) = (Pair::SternaSterna, Pair::QemuSterna);
        let rate = "checkpoints a second against QEMU's best";
        vec![
            goal("Sterna→Sterna, 10 ms, idle: checkpoints a second", idle(own), Bound::AtLeast(50.0)),
            goal("QEMU→Sterna, 10 ms, idle: checkpoints a second", idle(theirs), Bound::AtLeast(50.0)),
            goal(&format!("Sterna→Sterna, 10 ms, load: {rate}"), against(own, 10.0), Bound::AtLeast(2.0)),
            goal(&format!("QEMU→Sterna, 10 ms, load: {rate}"), against(theirs, 10.0), Bound::Stated),
            goal(&format!("Sterna→Sterna, 1 ms, load: {rate}"), against(own, 1.0), Bound::Stated),
            goal(
                "Sterna→Sterna, 50 ms, middle: the guest's rate against that under QEMU's best",
                work(own),
                Bound::AtLeast(1.5),
            ),
            goal("QEMU→Sterna, likewise", work(theirs), Bound::Stated),
        ]
    }

    fn amounts(&self) -> Vec<Option<Goal>> {
        let bytes = |pair, which: fn(&Row) -> bool| {
            // In the shortest interval, most of the sent bytes are devices and not pages.
            let which = move |row: &Row| row.delay_ms >= 10.0 && which(row);
            self.ratios(pair, which, |_, of| Some(of.bytes_per_checkpoint? / of.dirty_bytes?))
        };
        let resident = |pair| {
            self.ratios(
                pair,
                |_| true,
                |row, of| {
                    let limit = row.ram_bytes + JOURNAL_BYTES + MORE_BYTES;
                    Some(of.standby_resident_bytes as f64 / limit as f64)
                },
            )
        };
        let cpu = |pair, figure: Figure| {
            self.ratios(
                pair,
                |_| true,
                move |row, of| {
                    let mut same = self.qemus(row).filter(|(qemu, _)| qemu.channels == row.channels);
                    Some(figure(of) / figure(same.next()?.1))
                },
            )
        };
        let sparse: fn(&Row) -> bool = |row| row.load == Load::Sparse;
        let mut goals = vec![
            goal(
                "Sterna→Sterna, load: bytes against dirty pages",
                bytes(Pair::SternaSterna, is_load),
                Bound::AtMost(1.05),
            ),
            goal(
                "QEMU→Sterna, load: bytes against dirty pages",
                bytes(Pair::QemuSterna, is_load),
                Bound::AtMost(1.05),
            ),
            goal(
                "Sterna→Sterna, sparse writer, `xbzrle`: bytes against dirty pages",
                bytes(Pair::SternaSterna, sparse),
                Bound::AtMost(0.3),
            ),
        ];
        for (pair, name) in [(Pair::SternaSterna, "Sterna→Sterna"), (Pair::QemuSterna, "QEMU→Sterna")] {
            goals.push(goal(
                &format!("{name}: standby resident against RAM, limit of the journal and 64 MiB"),
                resident(pair),
                Bound::AtMost(1.0),
            ));
            goals.push(goal(
                &format!("{name}: CPU time of the standby for each checkpoint against QEMU's secondary"),
                cpu(pair, Figures::standby_cpu_ms_each),
                Bound::AtMost(1.0),
            ));
            goals.push(goal(
                &format!("{name}: CPU time of the primary, likewise"),
                cpu(pair, Figures::primary_cpu_ms_each),
                Bound::Stated,
            ));
        }
        goals
    }

    fn delays_and_takeovers(&self) -> Vec<Option<Goal>> {
        let delays = |pair| {
            self.ratios(
                pair,
                |_| true,
                |row, of| {
                    let limit = row.delay_ms + of.pause.p50 + 1.2 * of.transfer?.p50;
                    Some(of.output_delay?[0] / limit)
                },
            )
        };
        let takeover = |pair, is_planned| {
            let rows = self.0.iter().filter(move |row| row.pair == pair && row.is_planned() == is_planned);
            rows.filter_map(|row| Some((row.recovery?.p50, row))).collect::<Vec<_>>()
        };
        let planned = "planned takeover, right after a large checkpoint";
        let against = "output delay's p50 against interval, pause and 1.2 × transfer";
        vec![
            goal(&format!("Sterna→Sterna: {against}"), delays(Pair::SternaSterna), Bound::AtMost(1.0)),
            goal(&format!("QEMU→Sterna: {against}"), delays(Pair::QemuSterna), Bound::AtMost(1.0)),
            goal(
                "takeover, Sterna→Sterna, ms",
                takeover(Pair::SternaSterna, false),
                Bound::AtMost(STERNA_TAKEOVER),
            ),
            goal(
                &format!("{planned}, Sterna→Sterna, ms"),
                takeover(Pair::SternaSterna, true),
                Bound::AtMost(STERNA_TAKEOVER),
            ),
            goal(
                "takeover into a QEMU that waits, ms",
                takeover(Pair::QemuSterna, false),
                Bound::AtMost(QEMU_TAKEOVER),
            ),
            goal(
                &format!("{planned}, into a QEMU that waits, ms"),
                takeover(Pair::QemuSterna, true),
                Bound::AtMost(QEMU_TAKEOVER),
            ),
            goal("takeover by QEMU's secondary, ms", takeover(Pair::QemuQemu, false), Bound::Stated),
        ]
    }

    /// A value computed from each row of that pair.
    fn ratios(
        &self,
        pair: Pair,
        which: impl Fn(&Row) -> bool,
        figure: impl Fn(&'a Row, &'a Figures) -> Option<f64>,
    ) -> Vec<Value<'a>> {
        let rows = self.0.iter().filter(|row| row.pair == pair && which(row));
        rows.filter_map(|row| Some((figure(row, row.cell.as_ref()?)?, row))).collect()
    }

    /// QEMU's own rows with the same load and delay.
    fn qemus(&self, like: &Row) -> impl Iterator<Item = (&'a Row, &'a Figures)> {
        let (load, delay) = (like.load, like.delay_ms);
        let rows = self.0.iter();
        let same =
            rows.filter(move |row| row.pair == Pair::QemuQemu && row.load == load && row.delay_ms == delay);
        same.filter_map(|row| Some((row, row.cell.as_ref()?)))
    }
}

fn is_idle(row: &Row) -> bool {
    row.load == Load::Idle
}

fn is_load(row: &Row) -> bool {
    matches!(row.load, Load::Light | Load::Middle | Load::Heavy | Load::Upload)
}

fn least<'a>(
    rows: impl Iterator<Item = (&'a Row, &'a Figures)>,
    figure: impl Fn(&Figures) -> Option<f64>,
) -> Option<f64> {
    rows.filter_map(|(_, of)| figure(of)).min_by(f64::total_cmp)
}

fn most<'a>(
    rows: impl Iterator<Item = (&'a Row, &'a Figures)>,
    figure: impl Fn(&Figures) -> Option<f64>,
) -> Option<f64> {
    rows.filter_map(|(_, of)| figure(of)).max_by(f64::total_cmp)
}

/// The goal for these values; `None` without values. The worst value decides.
fn goal(what: &str, mut values: Vec<Value<'_>>, bound: Bound) -> Option<Goal> {
    values.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    let ((low, _), (high, _)) = (values.first()?, values.last()?);
    let worst = if matches!(bound, Bound::AtLeast(_)) { values.first()? } else { values.last()? };
    let measured = match &values[..] {
        [(one, _)] => figure(*one),
        _ => format!(
            "{} to {}, median {}; {} with {}",
            figure(*low),
            figure(*high),
            figure(values[values.len() / 2].0),
            figure(worst.0),
            place(worst.1)
        ),
    };
    Some(Goal { what: what.to_owned(), measured, goal: bound.text(), is_short: bound.is_missed_by(worst.0) })
}

fn place(row: &Row) -> String {
    let channels = match row.channels {
        0 => "main channel".to_owned(),
        count => format!("multifd {count}"),
    };
    format!("{}, {} ms, {channels}, {}", row.load.word(), row.delay_ms, row.mode)
}
