//! The total run time of each target, in `fuzz/ran.json`. The file is committed, so that a fresh
//! clone has it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::process::{self, Result};
use crate::workspace::root;

/// The amounts that one run adds.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// Seconds by the clock.
    pub seconds: u64,
    /// Seconds of processor time; fewer than by the clock on a busy machine.
    pub processor_seconds: u64,
    pub inputs: u64,
}

/// The totals of each target.
#[derive(Debug, Default)]
pub struct Ledger(BTreeMap<String, Entry>);

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Entry {
    seconds: u64,
    processor_seconds: u64,
    inputs: u64,
    last_date: String,
    last_commit: String,
}

impl Ledger {
    fn path() -> PathBuf {
        root().join("fuzz/ran.json")
    }

    /// Reads the ledger from its file; empty if there is no file.
    pub fn read() -> Result<Self> {
        match std::fs::read_to_string(Self::path()) {
            Ok(text) => Self::parse(&text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(format!("{}: {error}", Self::path().display())),
        }
    }

    /// Adds a run of `target`. Two commands may do so at the same time.
    pub fn add(target: &str, run: Run) -> Result<()> {
        let date = process::output(Command::new("date").args(["-u", "+%F"]))?;
        let mut git = Command::new("git");
        git.current_dir(root()).args(["rev-parse", "--short", "HEAD"]);
        // Sources without a git history can be fuzzed too.
        let commit = process::output(&mut git).unwrap_or_default();
        add_to(&Self::path(), target, run, date.trim(), commit.trim())
    }

    fn parse(text: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(text).map_err(|error| format!("fuzz/ran.json: {error}"))?;
        let object = value.as_object().ok_or("fuzz/ran.json is no object")?;
        let entries = object.iter().map(|(name, entry)| {
            let number = |key: &str| entry[key].as_u64().ok_or(format!("fuzz/ran.json: {name} lacks {key}"));
            let text = |key: &str| entry[key].as_str().unwrap_or_default().to_owned();
            let entry = Entry {
                seconds: number("seconds")?,
                processor_seconds: number("processor_seconds")?,
                inputs: number("inputs")?,
                last_date: text("last_date"),
                last_commit: text("last_commit"),
            };
            Ok((name.clone(), entry))
        });
        entries.collect::<Result<_>>().map(Self)
    }

    fn text(&self) -> String {
        let entries = self.0.iter().map(|(name, entry)| {
            let value = json!({
                "seconds": entry.seconds,
                "processor_seconds": entry.processor_seconds,
                "inputs": entry.inputs,
                "last_date": entry.last_date,
                "last_commit": entry.last_commit,
            });
            (name.clone(), value)
        });
        format!("{:#}\n", Value::Object(entries.collect()))
    }

    /// The whole ledger as a table for a reader.
    pub fn table(&self) -> String {
        let mut table =
            format!("{:<16} {:>8} {:>12} {:>14}  last run\n", "target", "ran", "processor", "inputs");
        for (name, entry) in &self.0 {
            let Entry { seconds, processor_seconds, inputs, last_date, last_commit } = entry;
            let _ = writeln!(
                table,
                "{name:<16} {:>8} {:>12} {inputs:>14}  {last_date}, on {last_commit}",
                minutes(*seconds),
                minutes(*processor_seconds)
            );
        }
        table
    }
}

fn minutes(seconds: u64) -> String {
    format!("{}:{:02}", seconds / 60, seconds % 60)
}

fn add_to(path: &Path, target: &str, run: Run, date: &str, commit: &str) -> Result<()> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut file = File::options().read(true).write(true).create(true).truncate(false).open(path);
    let file = file.as_mut().map_err(|error| format!("{}: {error}", path.display()))?;
    file.lock().map_err(failed)?;
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(failed)?;
    let mut ledger = if text.is_empty() { Ledger::default() } else { Ledger::parse(&text)? };
    let entry = ledger.0.entry(target.to_owned()).or_default();
    entry.seconds += run.seconds;
    entry.processor_seconds += run.processor_seconds;
    entry.inputs += run.inputs;
    (entry.last_date, entry.last_commit) = (date.to_owned(), commit.to_owned());
    let text = ledger.text();
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    file.set_len(text.len() as u64).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn add_twice_is_the_sum_and_the_last_commit() {
        let path = std::env::temp_dir().join(format!("sterna-ledger-{}", std::process::id()));
        let run = |seconds| Run { seconds, processor_seconds: seconds / 2, inputs: 1000 * seconds };

        add_to(&path, "b", run(60), "2026-01-01", "1111").unwrap();
        add_to(&path, "a", run(5), "2026-01-02", "2222").unwrap();
        add_to(&path, "b", run(540), "2026-01-03", "3333").unwrap();

        let ledger = Ledger::parse(&std::fs::read_to_string(&path).unwrap()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let entry = &ledger.0["b"];
        assert_eq!((entry.seconds, entry.processor_seconds, entry.inputs), (600, 300, 600_000));
        assert_eq!(entry.last_commit, "3333");
        let table = ledger.table();
        assert!(table.contains("10:00") && table.contains("2026-01-02, on 2222"), "{table}");
    }

    #[test]
    fn parse_of_an_entry_without_its_time_is_an_error() {
        assert!(Ledger::parse("{\"a\": {\"inputs\": 1}}").unwrap_err().contains("a lacks seconds"));
    }
}
