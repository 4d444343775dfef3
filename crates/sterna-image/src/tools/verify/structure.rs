//! Finds damage in an image's structure, for callers that read its pages for another purpose.

use super::container;
use super::legacy::{self, Stream};
use super::mapped::Depth;
use super::report::{Report, VerifyOptions};
use super::window::Window;
use crate::ImageError;
use crate::format::{Form, Format};
use crate::model::Shape;
use crate::read::body::End;
use crate::read::{Image, ReadAt};
use crate::tools::finding::{Finding, Severity};

/// The findings of [`verify`](super::verify()) for `image` that do not need its pages.
///
/// These are container, configuration, block list, places, bitmaps, devices and description. The open of a legacy
/// stream has checked its records, so all its damage is found.
///
/// The pages of a mapped-ram image are read only in these cases:
/// - no bit is set
/// - RAM has no END
/// - set bits are over holes of the file
///
/// Therefore two kinds of damage are missed: bitmaps in the other byte order in a file without holes, and disk errors
/// in unread pages.
///
/// # Errors
/// The image can no longer be read.
pub fn structure(image: &Image) -> Result<Vec<Finding>, ImageError> {
    // An image in Sterna's own format is judged as what its readers see: its view, or the stream that it contains.
    let format = image.view_format();
    match format.form() {
        Form::Legacy => {
            let source = Some(&**image.source());
            structure_of_stream(source, image.path_name(), format, image.shape(), image.end())
        }
        Form::Mapped => {
            let window = Window::new(&**image.source(), image.path_name())?;
            let mut report = Report::new(window.name, window.length);
            let front = container::examine(&window, &mut report)?;
            let options = VerifyOptions::default();
            super::mapped::examine_mapped(&window, &front, &options, Depth::Structure, &mut report)?;
            container::check_format(&front, Form::Mapped, &mut report);
            Ok(report.finish().findings)
        }
    }
}

/// Refuses an image in which [`structure`] finds damage.
///
/// # Errors
/// [`ImageError::Damaged`]; the image can no longer be read.
pub fn refuse_damage(image: &Image) -> Result<(), ImageError> {
    let damage = damage(structure(image)?);
    refuse(image.path_name(), &damage)
}

/// The findings that are damage (severity error).
pub(crate) fn damage(mut findings: Vec<Finding>) -> Vec<Finding> {
    findings.retain(|finding| finding.severity == Severity::Error);
    findings
}

/// Refuses the image in `file` if it has any `damage`.
pub(crate) fn refuse(file: &str, damage: &[Finding]) -> Result<(), ImageError> {
    let Some(first) = damage.first() else { return Ok(()) };
    Err(ImageError::Damaged { file: file.to_owned(), first: first.to_string(), more: damage.len() - 1 })
}

/// Like [`structure`], for a legacy stream that was read completely.
///
/// `source` is none for a pipe.
pub(crate) fn structure_of_stream(
    source: Option<&dyn ReadAt>,
    name: &str,
    format: Format,
    shape: &Shape,
    end: End,
) -> Result<Vec<Finding>, ImageError> {
    let length = source.map_or(Ok(0), |source| source.len_bytes());
    let mut report = Report::new(name, length.map_err(|error| ImageError::io(name, "fstat", error))?);
    if let Some(source) = source {
        let window = Window::new(source, name)?;
        let front = container::examine(&window, &mut report)?;
        container::check_format(&front, Form::Legacy, &mut report);
    }
    legacy::tail(&Stream { shape, end, format }, &mut report);
    Ok(report.finish().findings)
}
