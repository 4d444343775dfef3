//! The record of a migration: `--json` prints it, `--report` writes it and `sterna report` reads it.
//!
//! A record is one JSON object. `schema` and `version` identify it. A reader accepts any version up to its
//! own and ignores unknown fields. Every record contains its `units`, so that it can be read without the
//! documentation.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sterna::Statistics;
use sterna::stats::IncomingPostcopy;
use tempfile::NamedTempFile;

use crate::exit::Stop;
use crate::plan::Plan;

/// Value of the field `schema`.
pub const SCHEMA: &str = "sterna-migration";
/// The newest version of the record, and the one that is written.
pub const VERSION: u32 = 1;

/// One migration, from the source's point of view, with observations of the guest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The constant [`SCHEMA`], which identifies the format.
    pub schema: String,
    /// Version of the format; [`VERSION`] when it is written.
    pub version: u32,
    /// Units of the values, by the ending of their names.
    #[serde(default = "units")]
    pub units: BTreeMap<String, String>,
    /// The source's control socket.
    #[serde(default)]
    pub source: String,
    /// The destination's address, as in `migrate`.
    #[serde(default)]
    pub destination: String,
    /// `kvm` or `process`, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// The forecast, made before the first byte was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Plan>,
    /// The engine's statistics of the migration.
    #[serde(serialize_with = "crate::seconds::serialize")]
    pub statistics: Statistics,
    /// Why the arrival of the guest is uncertain: the source reported `completed`, and nothing confirmed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unconfirmed: Option<String>,
    /// The destination's statistics of a postcopy, if its monitor was given.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "crate::seconds::serialize")]
    pub arrival: Option<IncomingPostcopy>,
    /// Input of the precopy policy for `sterna::Recording::replay`: a JSON text in one line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precopy: Option<String>,
    /// The downtime that the guest itself observed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<Guest>,
    /// Whether the memory that arrived equals the memory that left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub check: Option<Check>,
    /// CPU time of the two VM processes during the migration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Cpu>,
}

/// The downtime by the guest's own clock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Guest {
    /// The longest gap between two heartbeats, seconds.
    pub downtime_seconds: f64,
    /// Resolution of the gap, seconds: the usual interval of two heartbeats.
    #[serde(default)]
    pub resolution_seconds: f64,
}

/// Result of a check of the guest's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Whether memory is one consistent cut and the guest made progress.
    pub passed: bool,
    /// The result as a sentence, with counts.
    pub summary: String,
}

/// CPU seconds, user and system together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    /// CPU seconds of the source's process, including the guest's own time.
    pub source_seconds: f64,
    /// CPU seconds of the destination's process.
    pub destination_seconds: f64,
}

fn units() -> BTreeMap<String, String> {
    let units = [
        (
            "*_time, *downtime, downtime_needed, downtime_limit, interval, began, took, sync, sync_parts.*, lanes.*, at, switchover[][1]",
            "seconds",
        ),
        ("*_seconds", "seconds"),
        ("*_bytes", "bytes; bandwidth_bytes, throughput_bytes, drain_bytes: bytes per second"),
        ("*_pages, pages", "pages of 4096 bytes"),
        ("*_per_second", "pages of 4096 bytes per second"),
    ];
    units.into_iter().map(|(name, unit)| (name.to_owned(), unit.to_owned())).collect()
}

impl Record {
    /// A record with these statistics. The caller fills in the optional fields.
    pub fn new(source: &str, destination: &str, statistics: Statistics) -> Self {
        let mut units = units();
        if statistics.postcopy.is_some() {
            let times = "all_sent, started, complete, part, average, p50, p99, longest, *blocktime, *latency, buckets[][1]";
            units.insert(times.into(), "seconds".into());
        }
        Self {
            schema: SCHEMA.into(),
            version: VERSION,
            units,
            source: source.into(),
            destination: destination.into(),
            machine: None,
            forecast: None,
            statistics,
            unconfirmed: None,
            arrival: None,
            precopy: None,
            guest: None,
            check: None,
            cpu: None,
        }
    }

    /// The record as indented JSON, with a newline at the end.
    pub fn to_json(&self) -> String {
        json_of(self)
    }

    /// Parses a record. The error describes the problem as part of a sentence.
    pub fn from_json(text: &str) -> Result<Self, String> {
        let value = value_of(text)?;
        if value["schema"] != SCHEMA {
            return Err(format!("is not a record of a migration (its `schema` is not \"{SCHEMA}\")"));
        }
        check_version(&value, VERSION)?;
        serde_json::from_value(value).map_err(|error| format!("is damaged ({error})"))
    }
}

/// A record as indented JSON, with a newline at the end.
pub(crate) fn json_of(record: &impl Serialize) -> String {
    let mut text = serde_json::to_string_pretty(record).expect("plain data is always JSON");
    text.push('\n');
    text
}

/// Parses a text as JSON. The error is part of a sentence.
pub(crate) fn value_of(text: &str) -> Result<serde_json::Value, String> {
    serde_json::from_str(text).map_err(|error| format!("is not JSON ({error})"))
}

/// Refuses a record without a version, or with a version above `newest`. The error is part of a sentence.
pub(crate) fn check_version(value: &serde_json::Value, newest: u32) -> Result<(), String> {
    match value["version"].as_u64() {
        Some(version) if (1..=u64::from(newest)).contains(&version) => Ok(()),
        Some(version) if version > u64::from(newest) => {
            Err(format!("has version {version}; this program reads up to {newest}: update it"))
        }
        _ => Err("has no `version`".into()),
    }
}

/// An output file that is written whole or not at all.
/// It is opened early, so that a problem shows before the command does anything else.
pub struct Report {
    file: PathBuf,
    /// A temporary file in the same directory; none for devices and pipes, which a rename cannot replace.
    aside: Option<NamedTempFile>,
}

impl Report {
    /// Creates a temporary file in the directory of `file`.
    pub fn begin(file: &Path) -> Result<Self, Stop> {
        let aside = match file.exists() && !file.is_file() {
            true => None,
            false => Some(beside(file).map_err(|error| unwritable(file, &error))?),
        };
        Ok(Self { file: file.to_owned(), aside })
    }

    /// Writes `record` and renames the file to its final name.
    pub fn write(self, record: &Record) -> Result<(), Stop> {
        self.write_text(&record.to_json())
    }

    /// Writes `text` and renames the file to its final name.
    pub fn write_text(self, text: &str) -> Result<(), Stop> {
        let file = self.file;
        let written = match self.aside {
            None => std::fs::write(&file, text),
            Some(mut aside) => aside
                .write_all(text.as_bytes())
                .and_then(|()| aside.as_file().sync_all())
                .and_then(|()| aside.persist(&file).map(drop).map_err(|error| error.error)),
        };
        written.map_err(|error| unwritable(&file, &error))
    }
}

/// Writes `text` to a temporary file and renames it to `file`, so that no reader sees a part.
pub fn write_whole(file: &Path, text: &str) -> Result<(), Stop> {
    Report::begin(file)?.write_text(text)
}

fn beside(file: &Path) -> io::Result<NamedTempFile> {
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    tempfile::Builder::new().prefix(".sterna-").permissions(permissions).tempfile_in(directory)
}

fn unwritable(file: &Path, error: &io::Error) -> Stop {
    Stop::failed(format!("cannot write {}: {error}. Choose another place with free space.", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn record_written_and_read_again_is_equal() {
        let record = samples::record();

        assert_eq!(Record::from_json(&record.to_json()), Ok(record));
    }

    /// A record that version 0.1 wrote.
    const OF_0_1: &str = include_str!("golden/record-0.1.json");

    #[test]
    fn record_of_0_1_is_read_and_written_again_byte_for_byte() {
        let read = Record::from_json(OF_0_1).unwrap();

        assert_eq!(read.to_json(), OF_0_1);
        // This version may forecast other values for the sample than 0.1 did.
        let without_forecast = |record: Record| Record { forecast: None, ..record };
        assert_eq!(without_forecast(read), without_forecast(samples::record()));
    }

    #[test]
    fn record_of_a_migration_over_rdma_is_read_again_and_names_rdma_there_alone() {
        let statistics = Statistics { rdma: Some(samples::rdma()), ..samples::engine_statistics() };
        let record = Record { statistics, ..samples::record() };

        let text = record.to_json();

        assert!(text.contains("\"destination_pinned_bytes\": 1073741824"), "{text}");
        assert!(!samples::record().to_json().contains("rdma"));
        assert_eq!(Record::from_json(&text), Ok(record));
    }

    #[test]
    fn record_of_a_postcopy_is_read_again_and_has_times_in_seconds() {
        let record = samples::record_of_postcopy();

        let text = record.to_json();

        for words in ["\"p99\": 0.0009", "\"at\": 3.2", "\"vcpu_blocktime\": [\n", "\"part\": 0.01"] {
            assert!(text.contains(words), "{words} is not in {text}");
        }
        assert!(!text.contains("nanos"), "{text}");
        let of = |statistics| Record::new("", "", statistics).units.keys().any(|names| names.contains("p99"));
        assert!(of(record.statistics.clone()) && !of(samples::engine_statistics()));
        assert!(!samples::record().to_json().contains("arrival"));
        assert_eq!(Record::from_json(&text), Ok(record));
    }

    #[test]
    fn record_reads_times_in_either_form_and_refuses_what_is_no_time() {
        let with =
            |time: &str| OF_0_1.replacen("\"total_time\": 2.35", &format!("\"total_time\": {time}"), 1);
        let read = |time: &str| Record::from_json(&with(time));

        assert_eq!(read("{\"secs\": 2, \"nanos\": 350000000}"), Record::from_json(OF_0_1));
        assert!(read("-1.0").is_err() && read("\"long\"").is_err() && read("1e40").is_err());
    }

    #[test]
    fn record_of_a_newer_version_is_refused_with_advice() {
        let text = samples::record().to_json().replace("\"version\": 1", "\"version\": 2");

        assert!(Record::from_json(&text).unwrap_err().contains("update"));
    }

    #[test]
    fn record_with_unknown_fields_is_read() {
        let text = samples::record().to_json().replacen('{', "{\"later\": [1, 2],", 1);

        assert_eq!(Record::from_json(&text), Ok(samples::record()));
    }

    #[test]
    fn record_cut_anywhere_is_an_error() {
        let text = samples::record().to_json();

        for end in (0..text.trim_end().len()).step_by(7) {
            assert!(Record::from_json(&text[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn record_of_something_else_is_refused() {
        assert!(Record::from_json("[]").is_err());
        assert!(Record::from_json("{\"schema\":\"x\",\"version\":1}").is_err());
        assert!(Record::from_json("{\"schema\":\"sterna-migration\"}").is_err());
    }

    #[test]
    fn write_replaces_the_file_and_leaves_nothing_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("r.json");
        std::fs::write(&file, "old").unwrap();

        Report::begin(&file).unwrap().write(&samples::record()).unwrap();

        assert_eq!(Record::from_json(&std::fs::read_to_string(&file).unwrap()), Ok(samples::record()));
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn report_that_cannot_be_written_is_refused_before_it_is_needed_and_one_that_is_dropped_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let nowhere = Report::begin(&directory.path().join("missing").join("r.json"));
        let dropped = Report::begin(&directory.path().join("r.json")).unwrap();

        drop(dropped);

        assert!(nowhere.is_err());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn answers_of_monitors_keep_times_as_serde_writes_them() {
        let answer = serde_json::to_value(samples::engine_statistics()).unwrap();

        assert_eq!(answer["total_time"], serde_json::json!({"secs": 2, "nanos": 350_000_000}));
        assert_eq!(serde_json::from_value::<Statistics>(answer).unwrap(), samples::engine_statistics());
    }
}
