//! `sterna report`: a migration's record as an HTML page.

use std::path::PathBuf;

use crate::exit::{Done, Status};
use crate::record::{self, Record};
use crate::{report, terminal};

/// Which record, and where the page goes.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Record that `sterna migrate --report` or `sterna demo --report` wrote, or their `--json` output
    pub file: PathBuf,
    /// Page to write [default: the record's name with .html]
    #[arg(short, long, value_name = "FILE.html")]
    pub output: Option<PathBuf>,
}

/// Writes the page.
pub fn execute(arguments: &Arguments) -> Done {
    let record = Record::read(&arguments.file)?;
    let output = arguments.output.clone().unwrap_or_else(|| arguments.file.with_extension("html"));
    record::write_whole(&output, &report::page(&record))?;
    terminal::note(&format!("wrote {}", output.display()));
    Ok(Status::Done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit;
    use crate::samples;

    #[test]
    fn report_of_a_record_writes_a_page_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("m.json");
        record::Report::begin(&file).unwrap().write(&samples::record()).unwrap();

        let done = execute(&Arguments { file, output: None });

        assert_eq!(done, Ok(Status::Done));
        let page = std::fs::read_to_string(directory.path().join("m.html")).unwrap();
        assert!(page.starts_with("<!DOCTYPE html>"));
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
