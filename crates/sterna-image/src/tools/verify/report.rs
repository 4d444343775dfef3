//! The result of a verification.

use serde::Serialize;

use crate::tools::finding::{Finding, Severity};

/// Options of a verification.
#[derive(Debug, Clone)]
pub struct VerifyOptions {
    /// Threads that read data; at least 1.
    pub threads: usize,
    /// Whether to compute RAM's digest.
    pub digest: bool,
}

impl Default for VerifyOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { threads: (2 * cores).clamp(2, 8), digest: false }
    }
}

/// The result of a verification.
#[derive(Debug, Clone, Serialize)]
pub struct Verdict {
    /// Path or name of the file.
    pub file: String,
    /// Format of the image, as `sterna convert` names it, as far as it was detected.
    pub kind: String,
    /// Machine type from the configuration; empty if it was not read.
    pub machine_type: String,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Bytes that were read from the file.
    pub read_bytes: u64,
    /// Length of all RAM blocks in bytes.
    pub ram_bytes: u64,
    /// Number of pages with content.
    pub data_pages: u64,
    /// Number of zero pages.
    pub zero_pages: u64,
    /// XXH3 digest of RAM (128 bits). Equal RAM has an equal digest, whatever the form of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// All findings, by descending severity, then in the order of the file.
    pub findings: Vec<Finding>,
}

impl Verdict {
    /// Whether no finding is an error; warnings and notes do not count.
    pub fn is_sound(&self) -> bool {
        self.count(Severity::Error) == 0
    }

    /// Number of findings with this severity.
    pub fn count(&self, severity: Severity) -> usize {
        self.findings.iter().filter(|finding| finding.severity == severity).count()
    }

    /// Whether a finding has this code.
    pub fn has(&self, code: &str) -> bool {
        self.findings.iter().any(|finding| finding.code == code)
    }
}

/// A verdict under construction.
pub(super) struct Report {
    pub(super) verdict: Verdict,
}

impl Report {
    pub(super) fn new(name: &str, file_bytes: u64) -> Self {
        let verdict = Verdict {
            file: name.to_owned(),
            kind: String::new(),
            machine_type: String::new(),
            file_bytes,
            read_bytes: 0,
            ram_bytes: 0,
            data_pages: 0,
            zero_pages: 0,
            digest: None,
            findings: Vec::new(),
        };
        Self { verdict }
    }

    pub(super) fn add(&mut self, finding: Finding) {
        self.verdict.findings.push(finding);
    }

    pub(super) fn is_sound(&self) -> bool {
        self.verdict.is_sound()
    }

    /// Sorts the findings by descending severity, then by place.
    pub(super) fn finish(mut self) -> Verdict {
        self.verdict
            .findings
            .sort_by_key(|finding| (std::cmp::Reverse(finding.severity), finding.place.byte));
        self.verdict
    }
}
