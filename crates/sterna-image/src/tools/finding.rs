//! What a check found: how bad, where, by which rule, what follows from it, and what to do.

use std::fmt;

use serde::Serialize;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing; nothing is wrong.
    Note,
    /// It loads as it was meant to today, but something is not as a careful writer leaves it.
    Warning,
    /// The image is damaged or not whole.
    Error,
}

/// Where in an image.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Place {
    /// Byte of the file, or with [`Place::is_decompressed`] of the stream after decompressing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub byte: Option<u64>,
    /// Whether `byte` counts in the decompressed stream.
    #[serde(rename = "is_unpacked", skip_serializing_if = "std::ops::Not::not")]
    pub is_decompressed: bool,
    /// RAM block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block: Option<String>,
    /// First page in that block.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page: Option<u64>,
    /// Section of a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub section: Option<String>,
}

impl Place {
    /// A byte of the file.
    pub fn byte(byte: u64) -> Self {
        Self { byte: Some(byte), ..Self::default() }
    }

    /// The same place, of this block.
    #[must_use]
    pub fn block(mut self, block: &str) -> Self {
        self.block = Some(block.to_owned());
        self
    }

    /// The same place, at this page.
    #[must_use]
    pub fn page(mut self, page: u64) -> Self {
        self.page = Some(page);
        self
    }

    /// The same place, in this section.
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

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// A stable name for programs, such as `stale-data`.
    pub code: &'static str,
    /// How bad.
    pub severity: Severity,
    /// Where.
    pub place: Place,
    /// What is there.
    pub what: String,
    /// The rule, as a paragraph of the project's specifications.
    pub rule: &'static str,
    /// What QEMU or libvirt makes of it.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub effect: &'static str,
    /// What to do.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub remedy: &'static str,
}

impl Finding {
    /// An error.
    pub fn error(code: &'static str, rule: &'static str, place: Place, what: impl Into<String>) -> Self {
        Self::new(Severity::Error, code, rule, place, what.into())
    }

    /// A warning.
    pub fn warning(code: &'static str, rule: &'static str, place: Place, what: impl Into<String>) -> Self {
        Self::new(Severity::Warning, code, rule, place, what.into())
    }

    /// A note.
    pub fn note(code: &'static str, rule: &'static str, place: Place, what: impl Into<String>) -> Self {
        Self::new(Severity::Note, code, rule, place, what.into())
    }

    /// With what follows from it when it is loaded.
    #[must_use]
    pub fn effect(mut self, effect: &'static str) -> Self {
        self.effect = effect;
        self
    }

    /// With what to do.
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
    /// One sentence each: where and what, what follows, what to do.
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
