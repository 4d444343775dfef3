//! What an image's structure says of damage, without reading its pages again: for those who read it for another purpose.

use super::container;
use super::legacy::{self, Stream};
use super::window::Window;
use super::{Depth, Finding, Report, Severity, VerifyOptions};
use crate::ImageError;
use crate::model::{Form, ImageKind, Shape};
use crate::read::body::End;
use crate::read::{Image, ReadAt};

/// What [`verify`](super::verify()) would find in `image`, as far as it can be told without its pages: container,
/// configuration, block list, places, bitmaps, devices, description. Opening a legacy stream has checked its records already,
/// so nothing that makes it damaged is missing. Of a mapped-ram image the pages are read only where no bit is set, RAM has no
/// END, or set bits lie over holes of the file: a bitmap in the other byte order in a file without holes is not seen, and
/// neither is a disk that cannot read pages which nobody needs.
///
/// # Errors
/// The image cannot be read any more.
pub fn structure(image: &Image) -> Result<Vec<Finding>, ImageError> {
    match image.kind().form {
        Form::Legacy => {
            let source = Some(&**image.source());
            structure_of_stream(source, image.path_name(), image.kind(), image.shape(), image.end())
        }
        Form::Mapped => {
            let window = Window::new(&**image.source(), image.path_name())?;
            let mut report = Report::new(window.name, window.length);
            let front = container::examine(&window, &mut report)?;
            let options = VerifyOptions::default();
            super::examine_mapped(&window, &front, &options, Depth::Structure, &mut report)?;
            container::check_format(&front, Form::Mapped, &mut report);
            Ok(report.finish().findings)
        }
    }
}

/// Refuses an image that is damaged, as far as [`structure`] tells.
///
/// # Errors
/// [`ImageError::Damaged`]; the image cannot be read any more.
pub fn refuse_damage(image: &Image) -> Result<(), ImageError> {
    let damage = damage(structure(image)?);
    refuse(image.path_name(), &damage)
}

/// Those of `findings` that are damage.
pub(crate) fn damage(mut findings: Vec<Finding>) -> Vec<Finding> {
    findings.retain(|finding| finding.severity == Severity::Error);
    findings
}

/// Refuses the image in `file` if it has any `damage`.
pub(crate) fn refuse(file: &str, damage: &[Finding]) -> Result<(), ImageError> {
    let Some(first) = damage.first() else { return Ok(()) };
    Err(ImageError::Damaged { file: file.to_owned(), first: first.to_string(), more: damage.len() - 1 })
}

/// As [`structure`], of a legacy stream that was read to its end; `source` is none for a pipe.
pub(crate) fn structure_of_stream(
    source: Option<&dyn ReadAt>,
    name: &str,
    kind: &ImageKind,
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
    legacy::tail(&Stream { shape, end, compression: kind.compression }, &mut report);
    Ok(report.finish().findings)
}
