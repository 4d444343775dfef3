//! `sterna report`: writes the record of a migration, of a protection or of a relayed migration as an HTML page.

use std::path::{Path, PathBuf};

use crate::exit::{Done, Status, Stop};
use crate::protection_record::{self, ProtectionRecord};
use crate::record::{self, Record};
use crate::relay_record::{self, RelayRecord};
use crate::{report, terminal};

/// Which record, and where the page goes.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Record that `--report` of `sterna migrate`, `sterna demo`, `sterna protect`, `sterna standby` or `sterna relay` wrote, or the `--json` output of a migration
    pub file: PathBuf,
    /// HTML page to write [default: the record's name with .html]
    #[arg(short, long, value_name = "FILE.html")]
    pub output: Option<PathBuf>,
}

/// Reads the record and writes its page.
pub fn execute(arguments: &Arguments) -> Done {
    let page = page(&arguments.file)?;
    let output = arguments.output.clone().unwrap_or_else(|| arguments.file.with_extension("html"));
    record::write_whole(&output, &page)?;
    terminal::note(&format!("wrote {}", output.display()));
    Ok(Status::Done)
}

/// The page of the record in `file`.
fn page(file: &Path) -> Result<String, Stop> {
    let name = file.display();
    let text = std::fs::read_to_string(file).map_err(|error| {
        Stop::unreadable(format!("cannot read {name}: {error}. Give a file that `--report` wrote."))
    })?;
    let page = record::value_of(&text).and_then(|value| match value["schema"].as_str() {
        Some(protection_record::SCHEMA) => {
            ProtectionRecord::from_json(&text).map(|record| report::protection_page(&record))
        }
        Some(relay_record::SCHEMA) => RelayRecord::from_json(&text).map(|record| report::relay_page(&record)),
        _ => Record::from_json(&text).map(|record| report::page(&record)),
    });
    page.map_err(|why| Stop::unreadable(format!("{name} {why}. Give a file that `--report` wrote.")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit;
    use crate::samples;

    #[test]
    fn report_of_each_kind_of_record_writes_its_page_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("m.json");
        for (text, title) in [
            (samples::record().to_json(), "<h1>Migration</h1>"),
            (samples::protection_record().to_json(), "<h1>Protection</h1>"),
            (samples::relay_record().to_json(), "<h1>Relayed migration</h1>"),
        ] {
            record::Report::begin(&file).unwrap().write_text(&text).unwrap();

            let done = execute(&Arguments { file: file.clone(), output: None });

            assert_eq!(done, Ok(Status::Done));
            let page = std::fs::read_to_string(directory.path().join("m.html")).unwrap();
            assert!(page.starts_with("<!DOCTYPE html>") && page.contains(title), "{page}");
        }
    }

    #[test]
    fn report_of_something_else_is_refused_and_writes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("m.json");
        std::fs::write(&file, "{}").unwrap();

        let stop = execute(&Arguments { file, output: None }).unwrap_err();

        assert_eq!(stop.status, exit::Status::Unreadable);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
