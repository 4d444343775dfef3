//! The result of one check: severity, place, rule, effect and remedy.

use std::fmt;

use serde::Serialize;

/// Severity of a finding, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Information; the image is valid.
    Note,
    /// The image loads correctly today, but differs from the output of a careful writer.
    Warning,
    /// The image is damaged or incomplete.
    Error,
}

/// The place of a finding in an image.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Place {
    /// Byte of the file, or of the decompressed stream with [`Place::is_decompressed`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub byte: Option<u64>,
    /// Whether `byte` is an offset in the decompressed stream.
    #[serde(rename = "is_unpacked", skip_serializing_if = "std::ops::Not::not")]
    pub is_decompressed: bool,
    /// Name of the RAM block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block: Option<String>,
    /// First affected page of that block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page: Option<u64>,
    /// Name of the device's section.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub section: Option<String>,
}

impl Place {
    /// A place at a byte of the file.
    pub fn byte(byte: u64) -> Self {
        Self { byte: Some(byte), ..Self::default() }
    }

    /// Adds a RAM block to the place.
    #[must_use]
    pub fn block(mut self, block: &str) -> Self {
        self.block = Some(block.to_owned());
        self
    }

    /// Adds a page number to the place.
    #[must_use]
    pub fn page(mut self, page: u64) -> Self {
        self.page = Some(page);
        self
    }

    /// Adds a section to the place.
    #[must_use]
    pub fn section(mut self, section: &str) -> Self {
        self.section = Some(section.to_owned());
        self
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if let Some(byte) = self.byte {
            let of = if self.is_decompressed { " of the decompressed stream" } else { "" };
            parts.push(format!("byte {byte:#x}{of}"));
        }
        if let Some(block) = &self.block {
            parts.push(format!("block {block}"));
        }
        if let Some(page) = self.page {
            parts.push(format!("page {page:#x}"));
        }
        if let Some(section) = &self.section {
            parts.push(format!("section {section}"));
        }
        f.write_str(if parts.is_empty() { "the file" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

/// One result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// A stable name for programs, such as `stale-data`.
    pub code: &'static str,
    /// Severity of the finding.
    pub severity: Severity,
    /// Place of the finding in the image.
    pub place: Place,
    /// The observation, as a clause.
    pub what: String,
    /// The rule, as a paragraph of the project's specifications.
    pub rule: &'static str,
    /// The effect when QEMU or libvirt loads the image.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub effect: &'static str,
    /// The recommended action of the user.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub remedy: &'static str,
}

impl Finding {
    /// Makes a finding of severity [`Severity::Error`].
    pub fn error(code: &'static str, rule: &'static str, place: Place, what: impl Into<String>) -> Self {
        Self::new(Severity::Error, code, rule, place, what.into())
    }

    /// Makes a finding of severity [`Severity::Warning`].
    pub fn warning(code: &'static str, rule: &'static str, place: Place, what: impl Into<String>) -> Self {
        Self::new(Severity::Warning, code, rule, place, what.into())
    }

    /// Makes a finding of severity [`Severity::Note`].
    pub fn note(code: &'static str, rule: &'static str, place: Place, what: impl Into<String>) -> Self {
        Self::new(Severity::Note, code, rule, place, what.into())
    }

    /// Adds the effect when QEMU or libvirt loads the image.
    #[must_use]
    pub fn effect(mut self, effect: &'static str) -> Self {
        self.effect = effect;
        self
    }

    /// Adds the recommended action.
    #[must_use]
    pub fn remedy(mut self, remedy: &'static str) -> Self {
        self.remedy = remedy;
        self
    }

    fn new(severity: Severity, code: &'static str, rule: &'static str, place: Place, what: String) -> Self {
        Self { code, severity, place, what, rule, effect: "", remedy: "" }
    }
}

impl fmt::Display for Finding {
    /// Writes one sentence each: place and observation, effect, remedy.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.place, self.what, self.rule)?;
        for more in [self.effect, self.remedy].into_iter().filter(|text| !text.is_empty()) {
            write!(f, ". {more}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_a_place_in_json_are_those_that_readers_know() {
        let place = Place { byte: Some(1), is_decompressed: true, ..Place::default() };

        let text = serde_json::to_string(&place).unwrap();

        assert_eq!(text, r#"{"byte":1,"is_unpacked":true}"#);
    }
}
