//! Formats tables for the terminal and for Markdown.

use std::fmt::Write as _;

use crate::figures::{Kind, Row, Spread, Table, times_as_fast};

/// A table for the terminal.
pub fn terminal(table: &Table) -> String {
    let cells: Vec<Vec<String>> = std::iter::once(headings(table)).chain(lines(table)).collect();
    let widths: Vec<usize> = (0..cells[0].len())
        .map(|column| cells.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
        .collect();
    let mut text = format!("\n{}\n", table.title);
    for line in cells {
        let mut out = String::from(" ");
        for (column, (cell, width)) in line.iter().zip(&widths).enumerate() {
            // Writing to a string never fails.
            let _ =
                if column == 0 { write!(out, " {cell:<width$}") } else { write!(out, "  {cell:>width$}") };
        }
        text.push_str(out.trim_end());
        text.push('\n');
    }
    text.push_str(&verdict(table));
    text
}

/// A table in Markdown.
pub fn markdown(table: &Table) -> String {
    let headings = headings(table);
    let mut text = format!("\n**{}**\n\n| {} |\n", table.title, headings.join(" | "));
    text.push_str(&format!("| --- |{}\n", " ---: |".repeat(headings.len() - 1)));
    for line in lines(table) {
        text.push_str(&format!("| {} |\n", line.join(" | ")));
    }
    text.push('\n');
    text.push_str(verdict(table).trim_start());
    text
}

fn headings(table: &Table) -> Vec<String> {
    let mut headings = vec!["", "seconds", "CPU s", "× QEMU's best", "of the limit"];
    if has_reported(table) {
        headings.insert(2, "said done after");
    }
    if has_downtime(table) {
        headings.push("downtime, ms");
    }
    headings.into_iter().map(str::to_owned).collect()
}

fn lines(table: &Table) -> Vec<Vec<String>> {
    let timed = table.rows.iter().filter(|row| !row.samples.is_empty());
    timed.map(|row| line(table, row)).collect()
}

fn line(table: &Table, row: &Row) -> Vec<String> {
    let against = |other: Option<&Row>| other.and_then(|other| times_as_fast(row, other));
    let is_limit = row.kind == Kind::Limit;
    let ratio =
        |value: Option<f64>| value.filter(|_| !is_limit).map_or(String::new(), |it| format!("{it:.2}"));
    let mut line = vec![
        row.name.clone(),
        with_range(row.seconds(), 2),
        row.cpu_seconds().map_or(String::new(), |it| format!("{:.2}", it.median)),
        ratio(against(table.best_of_qemu(row.rival))),
        ratio(against(table.limit())),
    ];
    if has_reported(table) {
        line.insert(2, row.reported_seconds().map_or(String::new(), |it| format!("{:.2}", it.median)));
    }
    if has_downtime(table) {
        line.push(with_range(row.downtime_ms(), 0));
    }
    line
}

/// One sentence on the most important result.
fn verdict(table: &Table) -> String {
    let (Some(ours), Some(theirs)) = (table.best_of_sterna(), table.best_of_qemu("")) else {
        return String::new();
    };
    let speed = times_as_fast(ours, theirs).unwrap_or(f64::NAN);
    let cpu = |row: &Row| row.cpu_seconds().map_or(f64::NAN, |it| it.median);
    let limit = table.limit().and_then(|limit| times_as_fast(ours, limit));
    let limit = limit.map_or(String::new(), |it| format!(", {it:.2} of the limit"));
    format!(
        "  best of each: {} is {speed:.2} times as fast as {}, with {:.2} of its CPU{limit}; {} repetitions\n",
        ours.name,
        theirs.name,
        cpu(ours) / cpu(theirs),
        ours.samples.len(),
    )
}

fn has_reported(table: &Table) -> bool {
    table.rows.iter().any(|row| row.samples.iter().any(|sample| sample.durable.is_some()))
}

fn has_downtime(table: &Table) -> bool {
    table.rows.iter().any(|row| row.downtime_ms().is_some())
}

fn with_range(spread: Option<Spread>, digits: usize) -> String {
    spread.map_or(String::new(), |it| {
        format!("{:.digits$} ({:.digits$}–{:.digits$})", it.median, it.least, it.most)
    })
}
