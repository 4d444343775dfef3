//! The plan as text for a terminal.

use std::fmt::Write;
use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use sterna::forecast::rules::Verdict;
use sterna::forecast::rules::qemu::Regime;
use sterna::forecast::{DirtyModel, Forecast, POSTCOPY_ASSUMPTIONS, Range, SwitchReason};

use super::format::Plan;
use crate::units;

/// The complete text: values, rules, forecast and advice.
pub fn table(plan: &Plan) -> String {
    let mut text = figures(plan);
    let _ = write!(text, "\n\n{}\n", rules(plan));
    if let Some(remark) = regime(plan) {
        let _ = writeln!(text, "{remark}");
    }
    if let Some(forecast) = forecast(plan) {
        let _ = write!(text, "\n{forecast}\n");
    }
    let _ = write!(text, "\n{}\n", verdict(plan));
    for (number, advice) in plan.advice.iter().enumerate() {
        let _ = writeln!(text, "  {}. {advice}", number + 1);
    }
    if let Some(postcopy) = postcopy(plan) {
        let _ = write!(text, "\n{postcopy}\n");
    }
    text
}

fn figures(plan: &Plan) -> String {
    let inputs = &plan.inputs;
    let mut table = plain();
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    if inputs.ram_bytes > 0 {
        let sent = match inputs.first_round_bytes {
            sent if sent < inputs.ram_bytes => format!(", {} of it to send", units::bytes(sent)),
            _ => String::new(),
        };
        row("guest RAM", units::bytes(inputs.ram_bytes) + &sent);
    }
    row("bandwidth", units::decimal_rate(inputs.bandwidth_bytes as f64));
    if let Some(rate) = inputs.switchover_bandwidth_bytes {
        row("switchover bandwidth", units::decimal_rate(rate as f64));
    }
    if let Some(rate) = inputs.avail_switchover_bandwidth_bytes {
        row("downtime estimated at", units::decimal_rate(rate as f64));
    }
    match &inputs.dirty {
        DirtyModel::Rate(rate) => row("dirty rate", units::decimal_rate(*rate as f64)),
        DirtyModel::Curve(points) => {
            for point in points {
                let name = format!("dirtied in {}", time(point.interval));
                let rate = point.distinct_bytes as f64 / point.interval.as_secs_f64().max(1e-9);
                row(&name, format!("{} ({})", units::bytes(point.distinct_bytes), units::decimal_rate(rate)));
            }
        }
        DirtyModel::WorkingSet(classes) => row("dirty rate", format!("{} classes of pages", classes.len())),
    }
    row("sync", time(inputs.sync));
    row("downtime limit", time(inputs.downtime_limit));
    if !inputs.fixed.downtime().is_zero() {
        row("stop, devices, start", time(inputs.fixed.downtime()));
    }
    row("uncertainty", format!("± {:.0} % of bandwidth and dirty rate", inputs.uncertainty * 100.0));
    let mut text = trimmed(&table);
    for assumed in &plan.assumed {
        let _ = write!(text, "\nnote: {assumed}");
    }
    text
}

fn rules(plan: &Plan) -> String {
    let mut table = plain();
    table.set_header([
        format!("at a constant {}", units::decimal_rate(plan.rules.dirty_bytes)),
        "required downtime limit".into(),
        "largest dirty rate".into(),
        "converges".into(),
    ]);
    let rows = [
        ("by QEMU's rule", plan.rules.qemu),
        ("by Sterna's rule", plan.rules.sterna),
        ("the same, with its margin", plan.rules.engine),
        ("physics' bound", plan.rules.physics),
    ];
    for (name, Verdict { downtime_needed, largest_dirty_bytes, converges, .. }) in rows {
        table.add_row([
            name.to_owned(),
            downtime_needed.map_or("no limit suffices".into(), units::seconds),
            units::decimal_rate(largest_dirty_bytes),
            if converges { "yes" } else { "no" }.into(),
        ]);
    }
    trimmed(&table)
}

/// A remark on which of QEMU's two formulas was used, and on the result of the other one.
fn regime(plan: &Plan) -> Option<String> {
    let regimes = &plan.rules.qemu_regimes;
    let other = match regimes.largest {
        Regime::Long => regimes.largest_by_short?,
        Regime::Short => regimes.largest_by_long,
    };
    let (used, unused) = match regimes.largest {
        Regime::Long => ("100 ms or more", "shorter"),
        Regime::Short => ("less than 100 ms", "longer"),
    };
    Some(format!(
        "QEMU's largest rate is for rounds of {used}; its formula for {unused} rounds, which does not apply here, \
         says {}.",
        units::decimal_rate(other)
    ))
}

fn forecast(plan: &Plan) -> Option<String> {
    let forecast = plan.forecast.as_ref()?;
    let mut table = plain();
    table.set_header(["forecast", "expected", "from", "to"]);
    let mut row = |name: &str, range: &Range, words: &dyn Fn(f64) -> String| {
        let shown = |figure: Option<f64>| figure.map_or("does not end".into(), words);
        table.add_row([name.to_owned(), shown(range.expected), shown(range.low), shown(range.high)]);
    };
    row("total time", &forecast.total_time, &units::seconds);
    row("downtime", &forecast.downtime, &units::seconds);
    row("rounds", &forecast.rounds, &|rounds| format!("{rounds:.0}"));
    row("bytes sent", &forecast.bytes, &|bytes| units::bytes(bytes as u64));
    Some(trimmed(&table))
}

/// The forecast of postcopy and its assumptions. If precopy may not converge and postcopy cannot be used, the
/// reason.
fn postcopy(plan: &Plan) -> Option<String> {
    let forecast = plan.forecast.as_ref()?;
    let Some(postcopy) = &forecast.postcopy else {
        let why = plan.inputs.postcopy.excluded.as_ref().filter(|_| !forecast.certain)?;
        return Some(format!("Postcopy cannot be used: {why}."));
    };
    let mut table = plain();
    let operators;
    let head = match postcopy.switch {
        SwitchReason::Operator => {
            let after = plan.inputs.postcopy.after.unwrap_or_default();
            operators = format!("with postcopy after {}", units::seconds(after.as_secs_f64()));
            &operators
        }
        SwitchReason::AfterRounds => {
            let rounds = plan.inputs.postcopy.after_rounds.unwrap_or_default();
            operators = match rounds {
                1 => "with postcopy after one round".to_owned(),
                _ => format!("with postcopy after {rounds} rounds"),
            };
            &operators
        }
        SwitchReason::AfterFirstRound => "with postcopy after the first round",
        _ => "with postcopy when precopy makes no more progress",
    };
    table.set_header([head, "expected", "from", "to"]);
    let mut row = |name: &str, range: &Range, words: &dyn Fn(f64) -> String| {
        let shown = |figure: Option<f64>| figure.map_or("not known".into(), words);
        table.add_row([name.to_owned(), shown(range.expected), shown(range.low), shown(range.high)]);
    };
    row("switch", &postcopy.switch_at, &units::seconds);
    row("downtime", &postcopy.downtime, &units::seconds);
    row("missing at the switch to postcopy", &postcopy.missing_bytes, &|bytes| units::bytes(bytes as u64));
    row("degraded until the last page", &postcopy.degraded_time, &units::seconds);
    row("total time", &postcopy.total_time, &units::seconds);
    row("page faults", &postcopy.faults, &|faults| units::count(faults as u64));
    let mut text = trimmed(&table);
    let most = units::count(postcopy.most_faults as u64);
    let _ = write!(text, "\nat most {most} page faults: one for each missing page");
    for assumed in POSTCOPY_ASSUMPTIONS {
        let _ = write!(text, "\nassumptions about postcopy: {assumed}");
    }
    Some(text)
}

fn verdict(plan: &Plan) -> String {
    let Some(forecast) = &plan.forecast else {
        let hint = "Give --ram for rounds, total time and downtime.";
        return match plan.rules.engine.converges {
            true => format!("It will converge. {hint}"),
            false => format!(
                "It will not converge: Sterna needs {}. {hint}",
                plan.rules.engine.downtime_needed.map_or(
                    "more bandwidth than the guest dirties".into(),
                    |needed| format!("a downtime limit of {}", units::seconds(needed))
                )
            ),
        };
    };
    let least = units::seconds(forecast.least_downtime);
    if plan.measured.as_ref().is_some_and(|measured| measured.monitor.starts_with("QEMU")) {
        // The rounds are those of Sterna's engine; a QEMU decides by its own rule.
        let (by_its_rule, if_sterna) = (plan.rules.qemu.converges, forecast.convergent);
        let word = |converges| if converges { "converge" } else { "NOT converge" };
        return format!(
            "By its own rule, this QEMU will {} at a constant dirty rate. The forecast is for a Sterna as the source, \
             which would {}.",
            word(by_its_rule),
            word(if_sterna)
        );
    }
    let over = over_the_limit(plan, forecast).unwrap_or_default();
    match (forecast.convergent, forecast.certain) {
        (true, true) => format!("It will converge.{over}"),
        (true, false) => {
            format!(
                "It will converge with little reserve, if bandwidth and dirty rate are as given.{over} To be certain:"
            )
        }
        (false, _) => format!("It will NOT converge: the shortest possible downtime is {least}. Either:"),
    }
}

/// A remark on an expected downtime above the limit.
/// The fixed part of the downtime does not stop the switchover, and the stated bandwidth may not be
/// available.
fn over_the_limit(plan: &Plan, forecast: &Forecast) -> Option<String> {
    let limit = plan.inputs.downtime_limit;
    let pause = forecast.downtime.expected.filter(|pause| *pause > limit.as_secs_f64())?;
    let (pause, limit) = (units::seconds(pause), time(limit));
    Some(format!(" But the expected downtime of {pause} is above the downtime limit of {limit}."))
}

fn time(time: Duration) -> String {
    units::seconds(time.as_secs_f64())
}

fn plain() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if let Some(column) = table.column_mut(0) {
        column.set_cell_alignment(CellAlignment::Left);
    }
    table
}

fn trimmed(table: &Table) -> String {
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}
