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
mod framed;
mod head;
mod judge;
mod legacy;
mod mapped;
mod places;
mod report;
mod structure;
mod tail;
mod window;

use std::path::Path;
use std::sync::Arc;

pub(crate) use structure::{damage, refuse, structure_of_stream};
pub use structure::{refuse_damage, structure};

use sterna_store::Place as StorePlace;

use super::finding::{Finding, Place};
use crate::ImageError;
use crate::format::Form;
use crate::read::half_repaired::{self, WithMagic};
use crate::read::open::{open_file, open_stored};
use crate::read::{Access, Image, MappedBlock, ReadAt};
use mapped::{Depth, examine_mapped};
use report::Report;
pub use report::{Verdict, VerifyOptions};
use window::Window;

/// Verifies the image at `path`.
///
/// # Errors
/// The function fails if no verdict is possible: the file cannot be opened, is not an image, or has an unknown
/// version. Damage is not an error but a finding.
pub fn verify(path: &Path, options: &VerifyOptions) -> Result<Verdict, ImageError> {
    verify_with(path, options, &Access::default())
}

/// Like [`verify`], with the key of an encrypted image, or with the places of a layer's bases.
///
/// # Errors
/// The errors of [`verify`].
pub fn verify_with(path: &Path, options: &VerifyOptions, access: &Access) -> Result<Verdict, ImageError> {
    let name = path.display().to_string();
    if !matches!(StorePlace::parse(path)?, StorePlace::File(_)) {
        return framed::judge(open_stored(path, access), &name, options, None);
    }
    let source = open_file(path)?;
    match framed::examine(&source, &name, options, access)? {
        Some(verdict) => Ok(verdict),
        None => access.check_plain(&name).and_then(|()| verify_source(source, &name, options)),
    }
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
    if let Some(verdict) = framed::examine(&source, name, options, &Access::default())? {
        return Ok(verdict);
    }
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
