//! Checks that the engine uses the pure machines completely: it calls each query of a machine
//! somewhere, and performs each action somewhere. docs/machines.md lists the places.
//!
//! A correct machine and a complete simulator do not help if the engine ignores a query. So every
//! query and action has a row, each named place contains the name, and the list has no other rows.

use std::collections::BTreeSet;

use crate::parts::Outcome;
use crate::process::Result;
use crate::workspace::root;

const LIST: &str = "docs/machines.md";

/// A machine: its name in the list, and the files of its methods and actions.
const MACHINES: &[(&str, &str, &str)] = &[
    ("source", "crates/sterna-proto/src/source/mod.rs", "crates/sterna-proto/src/source/types.rs"),
    (
        "destination",
        "crates/sterna-proto/src/destination/mod.rs",
        "crates/sterna-proto/src/destination/types.rs",
    ),
    (
        "primary",
        "crates/sterna-proto/src/replica/primary/mod.rs",
        "crates/sterna-proto/src/replica/primary/types.rs",
    ),
    (
        "standby",
        "crates/sterna-proto/src/replica/standby/mod.rs",
        "crates/sterna-proto/src/replica/standby/types.rs",
    ),
];

/// One row of the list in docs/machines.md.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    machine: String,
    is_action: bool,
    name: String,
    places: Vec<String>,
}

/// Fails with every query and action without a place, and every place without the name.
pub fn check() -> Result<Outcome> {
    let read =
        |path: &str| std::fs::read_to_string(root().join(path)).map_err(|error| format!("{path}: {error}"));
    let rows = rows(&read(LIST)?);
    let mut wrong = Vec::new();
    for (machine, methods, types) in MACHINES {
        let expected = queries(&read(methods)?)
            .into_iter()
            .map(|name| (false, name))
            .chain(actions(&read(types)?).into_iter().map(|name| (true, name)))
            .collect();
        wrong.extend(compare(machine, &expected, &rows));
    }
    for row in &rows {
        if row.places.is_empty() {
            wrong.push(format!("{LIST}: {} of the {} has no place", row.name, row.machine));
        }
        for place in &row.places {
            if !has(&read(place)?, row) {
                wrong.push(format!("{LIST}: {place} does not have {} of the {}", row.name, row.machine));
            }
        }
    }
    if wrong.is_empty() { Ok(Outcome::Passed) } else { Err(wrong.join("; ")) }
}

fn compare(machine: &str, expected: &BTreeSet<(bool, String)>, rows: &[Row]) -> Vec<String> {
    let listed: BTreeSet<_> = rows
        .iter()
        .filter(|row| row.machine == machine)
        .map(|row| (row.is_action, row.name.clone()))
        .collect();
    let missing = expected.difference(&listed).map(|(_, name)| {
        format!("{LIST}: {name} of the {machine} is missing: say where the engine asks or performs it")
    });
    let stale = listed.difference(expected).map(|(_, name)| format!("{LIST}: the {machine} has no {name}"));
    missing.chain(stale).collect()
}

/// Public methods that read a machine and do not change it.
fn queries(text: &str) -> BTreeSet<String> {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("pub fn "))
        .filter(|rest| rest.contains("(&self"))
        .filter_map(|rest| Some(rest.split_once('(')?.0.to_owned()))
        .collect()
}

/// The variants of the enum `Action`.
fn actions(text: &str) -> BTreeSet<String> {
    let body = text.split_once("pub enum Action {").and_then(|(_, rest)| rest.split_once("\n}"));
    body.map_or("", |(body, _)| body)
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .filter(|line| line.starts_with(char::is_uppercase))
        .map(|line| line.chars().take_while(|character| character.is_alphanumeric()).collect())
        .collect()
}

fn rows(text: &str) -> Vec<Row> {
    let row = |line: &str| {
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        let [machine, kind, name, places, ..] = cells[..] else { return None };
        let is_action = match kind {
            "query" => false,
            "action" => true,
            _ => return None,
        };
        let unquoted = |text: &str| text.trim().trim_matches('`').to_owned();
        let places = places.split(',').map(unquoted).filter(|place| !place.is_empty()).collect();
        Some(Row { machine: machine.to_owned(), is_action, name: unquoted(name), places })
    };
    text.lines().filter(|line| line.starts_with('|')).filter_map(row).collect()
}

/// Whether a source text calls the query or performs the action.
fn has(text: &str, row: &Row) -> bool {
    if row.is_action {
        let name = format!("Action::{}", row.name);
        return ends(text, &name);
    }
    [".", "::"].iter().any(|before| ends(text, &format!("{before}{}", row.name)))
}

/// Whether `name` occurs in the text and no letter follows it.
fn ends(text: &str, name: &str) -> bool {
    text.match_indices(name).any(|(at, _)| {
        !text[at + name.len()..].starts_with(|next: char| next.is_alphanumeric() || next == '_')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const METHODS: &str = "impl M {\n    pub fn new(a: u8) -> Self {\n    pub fn handle(&mut self, e: E) {\n    pub fn may_run(&self, now: D) -> bool {\n}\n";
    const TYPES: &str = "pub enum Action {\n    /// Stop it.\n    Stop,\n    Release(u64),\n}\npub enum Other {\n    No,\n}\n";

    fn expected() -> BTreeSet<(bool, String)> {
        let queries = queries(METHODS).into_iter().map(|name| (false, name));
        queries.chain(actions(TYPES).into_iter().map(|name| (true, name))).collect()
    }

    #[test]
    fn queries_and_actions_are_found_in_the_text() {
        let names: Vec<_> = expected().into_iter().map(|(_, name)| name).collect();
        assert_eq!(names, ["may_run", "Release", "Stop"]);
    }

    #[test]
    fn list_that_lacks_one_or_has_one_too_many_is_refused() {
        let all = "| m | query | `may_run` | `a.rs` | |\n| m | action | `Stop` | `a.rs`, `b.rs` | |\n| m | action | `Release` | `a.rs` | |\n";
        assert_eq!(compare("m", &expected(), &rows(all)), Vec::<String>::new());
        let less: String = all.lines().skip(1).map(|line| format!("{line}\n")).collect();
        assert!(compare("m", &expected(), &rows(&less))[0].contains("may_run of the m is missing"));
        let more = format!("{all}| m | query | `gone` | `a.rs` | |\n");
        assert!(compare("m", &expected(), &rows(&more))[0].contains("has no gone"));
    }

    #[test]
    fn place_has_to_have_the_name_itself() {
        let row =
            |is_action, name: &str| Row { machine: "m".into(), is_action, name: name.into(), places: vec![] };
        assert!(has("inspect(Primary::may_run)", &row(false, "may_run")));
        assert!(has("contact.may_run()", &row(false, "may_run")));
        assert!(!has("contact.may_run_now()", &row(false, "may_run")));
        assert!(!has("fn may_run()", &row(false, "may_run")));
        assert!(has("Action::Stop => stop(),", &row(true, "Stop")));
        assert!(!has("Action::StopGuest => stop(),", &row(true, "Stop")));
    }
}
