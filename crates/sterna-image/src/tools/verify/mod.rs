//! Checks an image: its structure, bitmaps, content and tail.
//!
//! QEMU checks little when it loads an image (specs/mapped-ram.md §6.3). It accepts truncated files, crashes on some,
//! and loads others with wrong memory. This module checks every property that does not need a running guest. It reads
//! every byte of data, so that an unreadable sector is found before the source is deleted.
//!
//! This module has its own decoder of mapped-ram images, separate from the reader that loads them. The reader stops
//! at the first broken rule. This decoder records a [`Finding`] and continues if possible, so that a report lists all
//! damage. At the end, the reader must open the image as well.
//!
//! ```text
//! container ── head ── blocks ── places ── tail ── content ── judgement
//! libvirt's    config  list of    in the    devices  every     stale data, lost data,
//! header       early   blocks     file, no  EOF,     byte,     torn saves
//!              sections           overlap   vmdesc   threads
//! ```

mod blocks;
mod container;
mod content;
mod head;
mod judge;
mod legacy;
mod places;
mod structure;
mod tail;
mod window;

use std::path::Path;
use std::sync::Arc;

pub(crate) use structure::{damage, refuse, structure_of_stream};
pub use structure::{refuse_damage, structure};

use serde::Serialize;

use super::finding::{Finding, Place, Severity};
use crate::ImageError;
use crate::format::Form;
use crate::read::half_repaired::{self, WithMagic};
use crate::read::image::open_file;
use crate::read::{Image, MappedBlock, ReadAt};
use window::Window;

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

/// Verifies the image at `path`.
///
/// # Errors
/// The function fails if no verdict is possible: the file cannot be opened, is not an image, or has an unknown
/// version. Damage is not an error but a finding.
pub fn verify(path: &Path, options: &VerifyOptions) -> Result<Verdict, ImageError> {
    verify_source(open_file(path)?, &path.display().to_string(), options)
}

/// Verifies the image in `source`; `name` appears in the report.
///
/// # Errors
/// The errors of [`verify`].
pub fn verify_source(
    source: Arc<dyn ReadAt>,
    name: &str,
    options: &VerifyOptions,
) -> Result<Verdict, ImageError> {
    let broken_off =
        half_repaired::broken_off(&*source).map_err(|error| ImageError::io(name, "read", error))?;
    let source = match broken_off {
        Some(offset) => Arc::new(WithMagic::new(source, offset)),
        None => source,
    };
    let window = Window::new(&*source, name)?;
    let stamp = window.stamp()?;
    let mut report = Report::new(name, window.length);
    if let Some(offset) = broken_off {
        let what = "an in-place repair was interrupted: the magic is QEVR, and bitmaps may be missing";
        report.add(
            Finding::error("half-repaired", "specs/mapped-ram.md §7.5", Place::byte(offset), what)
                .effect("Every reader refuses it")
                .remedy("`sterna repair --in-place` finishes it"),
        );
    }
    let front = container::examine(&window, &mut report)?;
    let form = match front.format.is_compressed() {
        false => head::form(&window, front.stream_offset),
        true => Form::Legacy,
    };
    let examined = match form {
        Form::Mapped => examine_mapped(&window, &front, options, Depth::All, &mut report),
        Form::Legacy => legacy::examine(&source, &window, &front, options, &mut report),
    };
    examined?;
    if front.stream_offset < window.length {
        container::check_format(&front, form, &mut report);
    }
    if form == Form::Mapped && report.is_sound() {
        cross_check(&source, name, &mut report);
    }
    if window.stamp()? != stamp {
        report.add(
            Finding::error(
                "changed",
                "specs/mapped-ram.md §8",
                Place::default(),
                "the file changed while it was being read",
            )
            .remedy("Verify it again when no program writes to it"),
        );
    }
    Ok(report.finish())
}

/// The parts of a mapped-ram image that a verification reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Depth {
    /// Every byte of data.
    All,
    /// Everything except the pages, unless bitmaps and holes show a problem there.
    Structure,
}

fn examine_mapped(
    window: &Window<'_>,
    front: &container::Front,
    options: &VerifyOptions,
    depth: Depth,
    report: &mut Report,
) -> Result<(), ImageError> {
    report.verdict.kind = front.format.in_form(Form::Mapped).to_string();
    let Some(head) = head::examine(window, front.stream_offset, report)? else {
        return if depth == Depth::All { content::read_all(window, options, report) } else { Ok(()) };
    };
    report.verdict.machine_type = head.machine_type.clone();
    let mut list = blocks::examine(window, &head, report)?;
    report.verdict.ram_bytes =
        list.blocks.iter().fold(0, |sum: u64, block| sum.saturating_add(block.length_bytes));
    places::examine(window, &head, &mut list, report);
    let tail = tail::examine(window, &head, &list, report)?;
    let bitmaps = places::bitmaps(window, &list, report)?;
    if depth == Depth::Structure && !judge::is_suspect(window, &list, &bitmaps, &tail) {
        return Ok(());
    }
    let content = content::examine(window, &list, options, report)?;
    judge::judge(window, &list, &bitmaps, &content, &tail, report);
    if options.digest && report.is_sound() {
        report.verdict.digest = Some(content::digest(window, &list, &bitmaps, options)?);
    }
    Ok(())
}

/// For each block, one bit for each page that is not zero in the file.
///
/// The bitmap does not affect these bits.
pub(super) fn data_pages(
    source: &dyn ReadAt,
    name: &str,
    blocks: &[MappedBlock],
    options: &VerifyOptions,
) -> Result<Vec<Vec<u64>>, ImageError> {
    let window = Window::new(source, name)?;
    let list = blocks::BlockList::of(blocks);
    let mut report = Report::new(name, window.length);
    let content = content::examine(&window, &list, options, &mut report)?;
    match report.verdict.findings.first() {
        Some(finding) => Err(ImageError::Request(format!("{name}: {finding}"))),
        None => Ok(content.data),
    }
}

/// Adds a finding if the reader that loads images refuses this image.
fn cross_check(source: &Arc<dyn ReadAt>, name: &str, report: &mut Report) {
    if let Err(error) = Image::open_source(Arc::clone(source), name) {
        report.add(Finding::error(
            "unreadable",
            "specs/mapped-ram.md §8",
            Place::default(),
            error.to_string(),
        ));
    }
}

/// A verdict under construction.
struct Report {
    verdict: Verdict,
}

impl Report {
    fn new(name: &str, file_bytes: u64) -> Self {
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

    fn add(&mut self, finding: Finding) {
        self.verdict.findings.push(finding);
    }

    fn is_sound(&self) -> bool {
        self.verdict.is_sound()
    }

    /// Sorts the findings by descending severity, then by place.
    fn finish(mut self) -> Verdict {
        self.verdict
            .findings
            .sort_by_key(|finding| (std::cmp::Reverse(finding.severity), finding.place.byte));
        self.verdict
    }
}
