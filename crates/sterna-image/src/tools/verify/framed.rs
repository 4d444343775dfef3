//! Checks images in Sterna's own format: header, index and every frame, then the view like any other image.

use std::sync::Arc;

use sterna_store::{Checked, StoreError, StoredImage};

use super::report::{Report, Verdict, VerifyOptions};
use crate::ImageError;
use crate::format::Format;
use crate::read::framed::{self, Access, VIEW};
use crate::read::{ReadAt, Stamp};
use crate::tools::finding::{Finding, Place};

/// Damaged frames that a report lists one by one.
const LISTED: usize = 100;

/// The verdict about an image in Sterna's own format; none if `source` has another format.
pub(super) fn examine(
    source: &Arc<dyn ReadAt>,
    name: &str,
    options: &VerifyOptions,
    access: &Access,
) -> Result<Option<Verdict>, ImageError> {
    let mut magic = [0; 8];
    let count = source.read_at(0, &mut magic).map_err(|error| ImageError::io(name, "read", error))?;
    if source.stored().is_some() || !StoredImage::is_magic(&magic[..count]) {
        return Ok(None);
    }
    let stamp = |source: &dyn ReadAt| source.stamp().map_err(|error| ImageError::io(name, "fstat", error));
    let before: Stamp = stamp(&**source)?;
    let verdict = judge(framed::stored(source, name, access), name, options, Some(source))?;
    if stamp(&**source)? != before {
        return Err(ImageError::Changed { file: name.to_owned() });
    }
    Ok(Some(verdict))
}

/// The verdict about an image, or about the reason why it does not open.
pub(super) fn judge(
    opened: Result<Arc<StoredImage>, ImageError>,
    name: &str,
    options: &VerifyOptions,
    source: Option<&Arc<dyn ReadAt>>,
) -> Result<Verdict, ImageError> {
    let length = source.map_or(Ok(0), |source| source.len_bytes());
    let length = length.map_err(|error| ImageError::io(name, "fstat", error))?;
    let mut report = Report::new(name, length);
    report.verdict.kind = Format::Sterna.name().to_owned();
    let stored = match opened {
        Ok(stored) => stored,
        Err(ImageError::Store(error)) if is_damage(&error) => {
            report.add(finding("index", &error, Place::default()));
            return Ok(report.finish());
        }
        Err(error) => return Err(error),
    };
    let checked = stored.check(options.threads)?;
    add_damage(&mut report, &checked);
    (report.verdict.file_bytes, report.verdict.read_bytes) = (stored.stored_bytes(), checked.bytes);
    report.verdict.ram_bytes = stored.blocks().iter().map(|block| block.length_bytes).sum();
    let has_view = stored.files().iter().any(|file| file.name == VIEW);
    if !report.is_sound() || !has_view {
        return Ok(report.finish());
    }
    let view = framed::view_of(&stored, source.map(Arc::clone))?;
    let mut verdict = super::verify_source(view, name, options)?;
    verdict.kind = Format::Sterna.name().to_owned();
    (verdict.file_bytes, verdict.read_bytes) = (stored.stored_bytes(), checked.bytes);
    Ok(verdict)
}

/// Whether the image is damaged. An image of a later version may be sound.
fn is_damage(error: &StoreError) -> bool {
    error.is_image_at_fault() && !matches!(error, StoreError::Unsupported { .. })
}

fn add_damage(report: &mut Report, checked: &Checked) {
    for damage in checked.damage.iter().take(LISTED) {
        report.add(finding("frame", &damage.error, Place::byte(damage.offset)));
    }
    let more = checked.damage.len().saturating_sub(LISTED);
    if more > 0 {
        let what = format!("{more} further frames are damaged");
        report.add(Finding::error("frame", "specs/image.md §7", Place::default(), what));
    }
}

fn finding(code: &'static str, error: &StoreError, place: Place) -> Finding {
    // The error's own advice is the finding's remedy.
    let what = match error {
        StoreError::Frame { frame, pages, reason, .. } => format!("frame {frame} ({pages}): {reason}"),
        error => error.to_string(),
    };
    Finding::error(code, "specs/image.md", place, what)
        .effect("Every reader refuses these pages")
        .remedy("Take another copy of the image")
}
