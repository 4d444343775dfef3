//! Converts any form of image to any other, with bounded memory, usually in one pass.
//!
//! | from | to | how |
//! | --- | --- | --- |
//! | legacy | legacy | copies the stream byte for byte and checks it; decompresses and compresses it again |
//! | legacy | mapped-ram | several threads write the records' pages to their places |
//! | mapped-ram | legacy | reads blocks ahead in file order, and writes every page as a record |
//! | mapped-ram | mapped-ram | makes a new layout; several threads share (reflinks) or copy pages, and keep holes |
//!
//! The machine does not change: devices and other opaque bytes are copied verbatim. Only the list of capabilities,
//! and the description's part about it, follow the new form (`specs/mapped-ram.md §7`).
//!
//! The converter checks the source while it copies, by the rules of [`verify`]. It refuses a damaged image
//! ([`ImageError::Damaged`]) unless [`ConvertOptions::force_damaged`] is set. In that case, [`Converted::damage`]
//! lists the damage that was copied unchanged.
//!
//! For these checks, only bitmaps and heads are read twice. One exception: a legacy file that is written to a pipe is
//! checked completely before the first byte. From a pipe to a pipe, the converter holds back the end of the stream
//! until the check has passed. A stream without its end cannot be loaded. See [`structure`] for the limits of these
//! checks.
//!
//! [`verify`]: crate::tools::verify
//! [`structure`]: crate::tools::verify::structure

mod check;
mod counts;
mod directory;
mod framed;
mod job;
mod memory;
mod out;
mod relayout;
mod request;
mod snapshot;
mod spread;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::ImageError;
use crate::format::{Form, Format};
use crate::model::{IGNORE_SHARED, Shape};
use crate::read::begun::Begun;
use crate::read::body::End;
use crate::read::framed::Framed;
use crate::read::image::check_unchanged;
use crate::read::open::open_with;
use crate::read::tee::Tee;
use crate::read::{Image, ReadAt, Stamp};
use crate::tools::verify::structure_of_stream;
use check::{check_domain, check_pipe, check_place, envelope};
use counts::Counts;
pub use directory::{ConvertedDirectory, convert_directory, copy_image, directory_kind, write_directory};
pub use framed::FrameOptions;
use job::Job;
pub use memory::MemoryPart;
pub use request::{ConvertOptions, Converted, Input, Output};
pub use snapshot::{Snapshot, store_snapshot};

/// Converts the image `from` to `to`.
///
/// # Errors
/// [`ImageError`]: the target's path is unchanged.
pub fn convert(from: Input, to: Output, options: &ConvertOptions) -> Result<Converted, ImageError> {
    let name = match &to {
        Output::File(path) => path.display().to_string(),
        Output::Pipe(_) => "standard output".to_owned(),
    };
    match &to {
        Output::File(path) => check_place(&from, path, options)?,
        Output::Pipe(_) => check_pipe(options.target)?,
    }
    let tee = Tee::default();
    let (begun, source) = match from {
        Input::File(path) => {
            let source = open_with(&path, &options.access)?;
            let file = path.display().to_string();
            let stamp = source.stamp().map_err(|error| ImageError::io(&file, "fstat", error))?;
            (Begun::of_source(&source, &file, Some(tee.clone()))?, Some((source, stamp, file)))
        }
        Input::Pipe(pipe) => (Begun::of_pipe(pipe, "standard input", Some(tee.clone()))?, None),
    };
    let (format, header) = (begun.format, begun.header.clone());
    let target =
        options.target.unwrap_or(if format.is_libvirt() { Format::LibvirtSparse } else { Format::MappedRam });
    let envelope = envelope(header.as_ref(), target, options)?;
    check_domain(header.as_ref(), &begun.head.shape, options)?;
    let is_stored = source.as_ref().is_some_and(|(source, ..)| source.stored().is_some());
    let (begun, source, format) = as_stream(begun, source, target, &tee)?;
    let counts = Counts::default();
    let job = Job { to, name, target, envelope, options, counts: &counts };
    let (shape, damage) = match (format.form(), source) {
        (Form::Mapped, Some((source, stamp, _))) => {
            tee.off();
            let image = Image::finish(begun, source, stamp, false)?;
            let damage = job.take_mapped(&image)?;
            (image.shape().clone(), damage)
        }
        (_, Some((source, stamp, file))) => {
            let check = |shape: &Shape, end: End| {
                check_unchanged(&*source, stamp, &file)?;
                structure_of_stream(Some(&*source), &file, format, shape, end)
            };
            // Only the end of the stream tells which blocks are left out, but the target needs this at its start.
            let skipped = begun.head.shape.has_capability(IGNORE_SHARED) && target.form() == Form::Mapped;
            let open = || Image::open_source(source.clone(), &file);
            let known = if skipped { Some(open()?) } else { None };
            // Bytes in a pipe cannot be taken back if damage is found later. Therefore the source is checked first.
            if matches!(job.to, Output::Pipe(_)) {
                job.examine(&open()?)?;
            }
            job.take_legacy(begun, &tee, known.as_ref().map(Image::shape), &check)?
        }
        (_, None) if begun.head.shape.has_capability(IGNORE_SHARED) && target.form() == Form::Mapped => {
            let text = "a stream with x-ignore-shared can be converted to mapped-ram only from a file, not from a \
                        pipe: the left-out blocks are known only at its end, but needed at the start";
            return Err(ImageError::Request(text.to_owned()));
        }
        (_, None) => {
            let file = begun.file_name().to_owned();
            let check = |shape: &Shape, end: End| structure_of_stream(None, &file, format, shape, end);
            job.take_legacy(begun, &tee, None, &check)?
        }
    };
    Ok(Converted {
        from: if is_stored { Format::Sterna } else { format },
        to: target,
        ram_bytes: shape.ram_bytes(),
        data_pages: counts.data.load(Ordering::Relaxed),
        zero_pages: counts.zero.load(Ordering::Relaxed),
        shared_bytes: counts.shared.load(Ordering::Relaxed),
        target_bytes: counts.target_bytes.load(Ordering::Relaxed),
        damage,
    })
}

/// A source: its bytes, its stamp, and its name.
type Source = (Arc<dyn ReadAt>, Stamp, String);

/// Takes the legacy stream of an image in Sterna's format in place of its view, if the target is a stream, too.
///
/// The result then has the bytes of the stream that the image was made from.
fn as_stream(
    begun: Begun,
    source: Option<Source>,
    target: Format,
    tee: &Tee,
) -> Result<(Begun, Option<Source>, Format), ImageError> {
    let format = begun.format;
    let Some((view, stamp, name)) = source else { return Ok((begun, None, format)) };
    let is_wanted = target.form() == Form::Legacy;
    let stream = if is_wanted { Framed::stream_of(&view)? } else { None };
    match stream {
        Some(stream) => {
            tee.restart();
            let mut again = Begun::of_source(&stream, &name, Some(tee.clone()))?;
            again.header = begun.header;
            let format = again.format;
            Ok((again, Some((stream, stamp, name)), format))
        }
        None => Ok((begun, Some((view, stamp, name)), format)),
    }
}
