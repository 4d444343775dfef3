//! The record of a session of `sterna relay`: `--report DIR` writes it and `sterna report` reads it.

mod format;
mod recorder;

pub use format::{Change, Part, RelayRecord, SCHEMA, VERSION};
pub use recorder::RelayRecorder;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn record_written_and_read_again_is_equal() {
        let record = samples::relay_record();

        assert!(RelayRecord::from_json(&record.to_json()) == Ok(record));
    }

    #[test]
    fn record_of_a_newer_version_and_of_something_else_is_refused() {
        let text = samples::relay_record().to_json();

        let newer = text.replace("\"version\": 1", "\"version\": 2");
        assert!(RelayRecord::from_json(&newer).unwrap_err().contains("update"));
        let other = RelayRecord::from_json(&samples::record().to_json()).unwrap_err();
        assert!(other.contains("not a record of a relay"), "{other}");
    }
}
