//! Makes rows from stored results.

use serde_json::Value;

/// Rows from the output of `qemu-bench --json`: for each table, a comparison of the best of both sides.
pub fn qemu(all: &Value) -> String {
    let mut text = "| what | Sterna | QEMU's best | limit | Sterna against QEMU | goal |\n\
                    | --- | --- | --- | --- | --- | --- |\n"
        .to_owned();
    for table in list(&all["tables"]) {
        let best = |kind: &str| {
            let rows = list(&table["rows"]).iter().filter(|row| row["kind"] == kind);
            let timed = rows.filter_map(|row| Some((middle(&seconds(row))?, row)));
            timed.min_by(|a, b| a.0.total_cmp(&b.0))
        };
        let (sterna, qemu, limit) = (best("sterna"), best("qemu"), best("limit"));
        let cell = |best: Option<(f64, &Value)>| best.map_or(String::new(), |(time, row)| side(time, row));
        text.push_str(&row(&[
            table["title"].as_str().unwrap_or_default().to_owned(),
            cell(sterna),
            cell(qemu),
            limit.map_or(String::new(), |(time, _)| format!("{time:.2}")),
            sterna.map_or(String::new(), |(_, ours)| {
                against(ours, qemu.map(|best| best.1), limit.map(|best| best.1))
            }),
            String::new(),
        ]));
    }
    text
}

/// Rows from the output of `converge --json`: one for each finding.
pub fn converge(all: &Value) -> String {
    let mut text = "| what | measured | goal | arguments |\n| --- | --- | --- | --- |\n".to_owned();
    let mut add = |what: String, measured: String, part: &str| {
        text.push_str(&row(&[what, measured, String::new(), format!("`-- --only {part}`")]));
    };
    let forecasts = list(&all["forecast"]);
    if !forecasts.is_empty() {
        let count = |name: &str| forecasts.iter().filter(|row| row[name] == true).count();
        let ended = count("ended");
        add(
            "forecast: verdict".into(),
            format!("{} of {} right", count("verdict_right"), forecasts.len()),
            "forecast",
        );
        for (what, name) in [("total time", "total_within"), ("downtime", "pause_within")] {
            add(
                format!("the same: {what} within 20 %"),
                format!("{} of the {ended} that end", count(name)),
                "forecast",
            );
        }
    }
    for limit in list(&all["limits"]) {
        let guest = numbers(&limit["guest_ms"]);
        let what = format!(
            "downtime that the guest saw, {} MiB, {:.0} % of the link, {} migrations at a limit of {} ms",
            limit["ram_mib"],
            number(&limit["written_percent"]),
            limit["migrations"],
            limit["limit_ms"]
        );
        let measured = format!(
            "limit kept in {} of the {} forecast to converge; median {:.0}, most {:.0} ms",
            limit["kept"],
            limit["foretold"],
            middle(&guest).unwrap_or(0.0),
            most(&guest)
        );
        add(what, measured, "limits");
    }
    for side in list(&all["qemu"]["sides"]) {
        let name = side["side"].as_str().unwrap_or_default();
        let what = format!("{name}, limit {} ms: largest dirty rate that converges", all["qemu"]["limit_ms"]);
        let measured = format!(
            "{} % of the link; limit kept up to {} %",
            side["ends_up_to_percent"], side["kept_up_to_percent"]
        );
        add(what, measured, "qemu");
    }
    for (index, run) in list(&all["lanes"]).iter().enumerate() {
        let idle = numbers(&run["idle_percent"]);
        let measured = format!(
            "median {:.1} %, most {:.1} %; the guest wrote {:.0} % of what lanes carry",
            middle(&idle).unwrap_or(0.0),
            most(&idle),
            number(&run["written_percent"])
        );
        add(
            format!("idle time of lanes in a round without a link limit, run {}", index + 1),
            measured,
            "lanes",
        );
    }
    text
}

fn row(cells: &[String]) -> String {
    format!("| {} |\n", cells.join(" | "))
}

/// Text such as `multifd 2: 0.19 (0.37), 13 ms`: seconds, CPU seconds, downtime.
fn side(time: f64, row: &Value) -> String {
    let cpu = middle(&numbers(&row["cpu_seconds"])).map_or(String::new(), |cpu| format!(" ({cpu:.2})"));
    let downtime = middle(&numbers(&row["downtime_ms"])).map_or(String::new(), |ms| format!(", {ms:.0} ms"));
    format!("{}: {time:.2}{cpu}{downtime}", row["name"].as_str().unwrap_or_default())
}

/// Speed against QEMU, share of its CPU time, share of the limit's speed: medians of the repetitions' ratios.
fn against(ours: &Value, qemu: Option<&Value>, limit: Option<&Value>) -> String {
    let speed = |other: &Value| {
        let ratios =
            seconds(ours).iter().zip(seconds(other)).map(|(ours, other)| other / ours).collect::<Vec<_>>();
        middle(&ratios)
    };
    let cpu = |row: &Value| middle(&numbers(&row["cpu_seconds"]));
    let parts = [
        qemu.and_then(speed).map(|speed| format!("{speed:.2} times as fast")),
        qemu.and_then(|qemu| Some(cpu(ours)? / cpu(qemu)?)).map(|part| format!("{part:.2} of the CPU")),
        limit.and_then(speed).map(|part| format!("{part:.2} of the limit")),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// Seconds of each repetition, until the data was durable if that was measured.
fn seconds(row: &Value) -> Vec<f64> {
    let pairs = list(&row["seconds_reported"]).iter().enumerate();
    let durable = |index: usize| row["seconds_durable"].get(index).and_then(Value::as_f64);
    pairs.filter_map(|(index, reported)| durable(index).or(reported.as_f64())).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn numbers(value: &Value) -> Vec<f64> {
    list(value).iter().filter_map(Value::as_f64).collect()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

fn middle(values: &[f64]) -> Option<f64> {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    if values.len() % 2 == 1 {
        Some(values[half])
    } else {
        Some(f64::midpoint(*values.get(half.checked_sub(1)?)?, values[half]))
    }
}

fn most(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::markdown::{Measured, document};

    fn stored(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn qemu_results_that_were_stored_become_rows_of_the_best_of_each_side() {
        let measured = Measured {
            date: "2026-11-21 18:26".into(),
            commit: "0abe75b".into(),
            machine: "2 cores of a Xeon, 24 GiB RAM, Linux 6.18".into(),
            command: "cargo xtask bench qemu -- --only live".into(),
        };

        let text = document(&measured, &qemu(&stored(include_str!("stored-qemu.json"))));

        assert_eq!(
            text,
            "2026-11-21 18:26 UTC, commit `0abe75b`. 2 cores of a Xeon, 24 GiB RAM, Linux 6.18. \
             `cargo xtask bench qemu -- --only live`.\n\n\
             | what | Sterna | QEMU's best | limit | Sterna against QEMU | goal |\n\
             | --- | --- | --- | --- | --- | --- |\n\
             | live, idle guest | multifd 2: 0.20 (0.40), 12 ms | multifd 8: 0.30 (0.50), 85 ms | 0.16 | \
             1.50 times as fast, 0.80 of the CPU, 0.80 of the limit |  |\n\
             | save to disk | mapped-ram: 2.00 (1.00) | mapped-ram: 3.00 (2.00) |  | 1.50 times as fast, 0.50 of the CPU |  |\n"
        );
    }

    #[test]
    fn convergence_results_that_were_stored_become_a_row_for_each_finding() {
        let text = converge(&stored(include_str!("stored-converge.json")));

        let rows: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(
            rows,
            [
                "| forecast: verdict | 2 of 3 right |  | `-- --only forecast` |",
                "| the same: total time within 20 % | 1 of the 2 that end |  | `-- --only forecast` |",
                "| the same: downtime within 20 % | 0 of the 2 that end |  | `-- --only forecast` |",
                "| downtime that the guest saw, 256 MiB, 12 % of the link, 3 migrations at a limit of 300 ms | limit kept in \
                 3 of the 3 forecast to converge; median 66, most 77 ms |  | `-- --only limits` |",
                "| Sterna, limit 100 ms: largest dirty rate that converges | 100 % of the link; limit kept up to 100 % |  | \
                 `-- --only qemu` |",
                "| idle time of lanes in a round without a link limit, run 1 | median 1.5 %, most 2.7 %; the guest wrote \
                 40 % of what lanes carry |  | `-- --only lanes` |",
            ]
        );
    }

    #[test]
    fn what_was_not_measured_has_no_row() {
        assert_eq!(converge(&stored("{}")).lines().count(), 2);
        assert_eq!(qemu(&stored("{\"tables\": []}")).lines().count(), 2);
    }
}
