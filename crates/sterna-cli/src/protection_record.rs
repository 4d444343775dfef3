//! The record of a protection: `--report` of `sterna protect` and `sterna standby` writes it, and `sterna report` reads it.
//!
//! A record is one JSON object, like a migration's ([`crate::record`]). `schema` and `version` identify it. A
//! reader accepts any version up to its own and ignores unknown fields. Times are seconds.
//!
//! - [`recorder`]: builds a record from samples of a protection.
//! - [`look`]: one sample, of either kind of primary, or of a standby.

mod format;
mod look;
mod recorder;

pub use format::{Change, GuestAt, Part, ProtectionRecord, SCHEMA, VERSION};
pub use look::Look;
pub use recorder::Recorder;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn record_written_and_read_again_is_equal() {
        let record = samples::protection_record();

        assert!(ProtectionRecord::from_json(&record.to_json()) == Ok(record));
    }

    #[test]
    fn record_of_a_newer_version_and_of_something_else_is_refused() {
        let text = samples::protection_record().to_json();

        let newer = text.replace("\"version\": 1", "\"version\": 2");
        assert!(ProtectionRecord::from_json(&newer).unwrap_err().contains("update"));
        let other = ProtectionRecord::from_json(&samples::record().to_json()).unwrap_err();
        assert!(other.contains("not a record of a protection"), "{other}");
        assert!(ProtectionRecord::from_json(&text[..text.len() / 2]).is_err());
    }
}
