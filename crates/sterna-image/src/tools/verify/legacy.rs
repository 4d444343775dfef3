//! Checks a legacy stream: reads and decompresses it to its end, and counts the pages.

use std::sync::Arc;

use super::blocks::BlockList;
use super::container::Front;
use super::content;
use super::places::Bits;
use super::report::{Report, VerifyOptions};
use super::tail::end_unknown;
use super::window::Window;
use crate::ImageError;
use crate::format::{Form, Format};
use crate::model::{IGNORE_SHARED, Shape};
use crate::read::body::End;
use crate::read::{Image, ReadAt};
use crate::tools::coverage::Coverage;
use crate::tools::description::Description;
use crate::tools::finding::{Finding, Place};
use crate::tools::sections::{ShapeWalk, Stop};
use crate::tools::spool;

const STREAM: &str = "specs/mapped-ram.md §3";
const DESCRIPTION: &str = "specs/mapped-ram.md §1.6";

/// Reads the whole stream and adds findings.
pub(super) fn examine(
    source: &Arc<dyn ReadAt>,
    window: &Window<'_>,
    front: &Front,
    options: &VerifyOptions,
    report: &mut Report,
) -> Result<(), ImageError> {
    report.verdict.kind = front.format.in_form(Form::Legacy).to_string();
    if window.length == 0 {
        report.verdict.kind = "nothing".into();
    }
    if front.is_complete && front.stream_offset >= window.length && report.is_sound() {
        let what = "the file ends where the stream must start";
        report.add(
            Finding::error("truncated", "specs/libvirt-save.md §1", Place::byte(window.length), what)
                .effect("libvirt starts a QEMU, which stops")
                .remedy("Use a complete copy of the file"),
        );
    }
    if !front.is_complete || front.stream_offset >= window.length {
        // The findings so far describe the image. Only unreadable places remain to be found.
        return content::read_all(window, options, report);
    }
    let image = match Image::open_source(Arc::clone(source), window.name) {
        Ok(image) => image,
        Err(error) => {
            add_error(error, front, report)?;
            return Ok(());
        }
    };
    report.verdict.kind = image.format().to_string();
    report.verdict.machine_type = image.shape().configuration.machine_type.clone();
    report.verdict.ram_bytes = image.shape().ram_bytes();
    report.verdict.read_bytes = window.length;
    tail(&Stream { shape: image.shape(), end: image.end(), format: front.format }, report);
    pages(&image, front, report)?;
    if options.digest && report.is_sound() {
        report.verdict.digest = Some(digest(&image, options)?);
    }
    Ok(())
}

/// Computes RAM's digest. It needs pages in order, so the stream is spooled first.
fn digest(image: &Image, options: &VerifyOptions) -> Result<String, ImageError> {
    let spool = image.spool(&spool::default_directory())?;
    let name = image.path_name();
    let blocks = spool.mapped().map_or(&[][..], |mapped| mapped.blocks());
    content::digest(
        &Window::new(&**spool.source(), name)?,
        &BlockList::of(blocks),
        &Bits::of(blocks),
        options,
    )
}

/// Counts pages. Every page must occur in the stream.
fn pages(image: &Image, front: &Front, report: &mut Report) -> Result<(), ImageError> {
    let shape = image.shape();
    let mut seen = Coverage::empty(shape);
    match image.visit_pages(&mut seen) {
        Ok(()) => {}
        // Deltas cannot be visited without the previous content. The open has already read and checked them.
        Err(ImageError::Request(_)) if image.has_deltas() => {
            let what = "pages were sent as differences (XBZRLE); each was checked";
            report.add(Finding::note("xbzrle", "specs/mapped-ram.md §3.2", Place::default(), what));
            return Ok(());
        }
        Err(error) => return add_error(error, front, report),
    }
    for (block, seen) in shape.ram.blocks.iter().zip(&seen.blocks) {
        let (pages, came) = (seen.pages, seen.came_pages());
        report.verdict.data_pages += seen.data_pages();
        let place = Place { block: Some(block.name.clone()), ..Place::default() };
        if came == 0 && shape.has_capability(IGNORE_SHARED) {
            let what = "its RAM is not in the image: it was shared memory, and the save left it out (x-ignore-shared)";
            report.add(Finding::note("skipped", "specs/mapped-ram.md §2.1", place, what));
            continue;
        }
        report.verdict.zero_pages += pages;
        if came < pages {
            let first = seen.first_missing();
            let what = format!("{} of {pages} pages are missing", pages - came);
            let place = place.page(first.unwrap_or(0));
            if is_virtio_mem(shape, &block.name) {
                let finding = Finding::note("not-plugged", STREAM, place, what);
                report.add(finding.effect("The device leaves out unplugged memory"));
            } else {
                let finding = Finding::warning("pages-missing", STREAM, place, what);
                report.add(finding.effect("A loader leaves its memory unchanged there"));
            }
        }
    }
    report.verdict.zero_pages = report.verdict.zero_pages.saturating_sub(report.verdict.data_pages);
    Ok(())
}

/// Whether an early section with the block's path shows that it is a virtio-mem device's.
///
/// QEMU 10.0 writes this section after START.
fn is_virtio_mem(shape: &Shape, block: &str) -> bool {
    let Some((path, _)) = block.rsplit_once('/') else { return false };
    let name = format!("{path}/virtio-mem-device-early");
    let holds = |bytes: &[u8]| bytes.windows(name.len()).any(|window| window == name.as_bytes());
    holds(&shape.early) || holds(&shape.setup)
}

/// A legacy stream that was read to its end.
pub(super) struct Stream<'a> {
    pub(super) shape: &'a Shape,
    pub(super) end: End,
    pub(super) format: Format,
}

/// Checks the end of the stream: devices, EOF, description.
pub(super) fn tail(stream: &Stream<'_>, report: &mut Report) {
    let Stream { shape, end: told, format } = stream;
    let place =
        |byte: u64| Place { byte: Some(byte), is_decompressed: format.is_compressed(), ..Place::default() };
    let parsed = shape.description.as_deref().map(Description::parse);
    let unusable = parsed.as_ref().and_then(|parsed| parsed.as_ref().err()).map(|error| error.rule.clone());
    let description = parsed.and_then(Result::ok);
    let end = told.stream_end;
    let described = shape.description.as_ref().map_or(0, |text| text.len() as u64 + 5);
    let devices_at = end.saturating_sub(described + u64::from(shape.has_eof) + shape.devices.len() as u64);
    if told.is_end_unsure {
        report.add(end_unknown(place(end)));
    } else if !shape.has_eof {
        report.add(
            Finding::error(
                "no-eof",
                STREAM,
                place(end),
                "the stream ends without its EOF byte, inside the devices",
            )
            .effect("QEMU stops when it loads this")
            .remedy("Use a complete copy of the file, or save again"),
        );
    } else if told.is_description_torn {
        report.add(
            Finding::error(
                "description-cut",
                DESCRIPTION,
                place(end),
                "the stream ends inside the description",
            )
            .effect("QEMU loads it without an error: RAM and devices are complete")
            .remedy("Use a complete copy of the file, or `sterna convert --force-damaged` it, which leaves the description out"),
        );
    } else if shape.description.is_none() {
        let what = "the stream ends at EOF, without a description: the machine leaves it out (suppress-vmdesc), or \
                    the file was truncated exactly here";
        report.add(Finding::warning("no-description", DESCRIPTION, place(end), what).effect("QEMU loads it"));
    } else if let Some(why) = unusable {
        let what = format!("it cannot be read: {why}");
        report.add(
            Finding::error("description", DESCRIPTION, place(end - described + 5), what)
                .effect("QEMU ignores it; tools that read images use it"),
        );
    }
    if told.trailing_bytes > 0 {
        let what = format!("{} bytes follow the end of the stream", told.trailing_bytes);
        report.add(Finding::warning("trailing", DESCRIPTION, place(end), what).effect("QEMU ignores them"));
    }
    if !shape.has_end {
        let what = "RAM has no END: this is a background snapshot";
        report.add(
            Finding::note("no-end", "specs/mapped-ram.md §1.4", Place::default(), what)
                .effect("QEMU loads it"),
        );
    }
    if shape.ram.footers && shape.has_eof {
        let walk = ShapeWalk::of(shape, description.as_ref());
        let mut found = 0;
        let stretches = walk.stretches(shape);
        let last = stretches.len() - 1;
        for (index, (walk, _)) in stretches.into_iter().enumerate() {
            found += walk.sections.len();
            for flaw in &walk.flaws {
                // Only the offset of the devices is known, because they are at the end of the stream.
                let place =
                    if index == last { place(devices_at + flaw.offset as u64) } else { Place::default() };
                let code = if flaw.in_description { "description-disagrees" } else { "devices" };
                report.add(Finding::error(code, DESCRIPTION, place, flaw.what.clone()));
            }
        }
        let listed = description.as_ref().map_or(found, |description| description.devices().len());
        if walk.devices.stop == Stop::Whole && listed > found {
            let what = format!("{} devices that it lists are not in the stream", listed - found);
            report.add(Finding::error("description-disagrees", DESCRIPTION, place(end), what));
        }
    }
}

/// Converts an error of the reader into a finding. An error that the image does not cause stays an error.
fn add_error(error: ImageError, front: &Front, report: &mut Report) -> Result<(), ImageError> {
    let is_decompressed = front.format.is_compressed();
    let place = |byte: u64| Place { byte: Some(byte), is_decompressed, ..Place::default() };
    let finding = match error {
        ImageError::Broken { offset, rule, paragraph, .. } => {
            Finding::error("broken", paragraph, place(offset), rule).effect("QEMU stops when it loads this")
        }
        ImageError::Torn { offset, what, .. } => {
            Finding::error("truncated", STREAM, place(offset), format!("the stream ends inside {what}"))
                .effect("QEMU stops when it loads this")
                .remedy("Use a complete copy of the file, or save again")
        }
        ImageError::Compression { compression, reason, decompressed, compressed, .. } => {
            let what = format!(
                "{compression} cannot decompress it: {reason}; the damage is in the block that holds this byte or ends there; \
                 {decompressed} bytes were decompressed by then"
            );
            Finding::error("packing", "specs/libvirt-save.md §2", Place::byte(compressed), what)
                .effect("libvirt's restore fails during the load")
                .remedy("Use a good copy of the file, or save again")
        }
        ImageError::TooLarge { what, limit_bytes, .. } => {
            let what = format!("{what} needs more than {limit_bytes} bytes");
            Finding::error("too-large", STREAM, Place::default(), what)
                .remedy("No machine has this much: use a good copy of the file")
        }
        ImageError::Changed { .. } => {
            Finding::error("changed", STREAM, Place::default(), "the file changed while it was being read")
                .remedy("Verify it again when no program writes to it")
        }
        ImageError::Io { call: "read", source, .. } => {
            Finding::error("unreadable", STREAM, Place::default(), format!("cannot be read: {source}"))
                .remedy("Check the disk (dmesg) and use another copy of the file")
        }
        other => return Err(other),
    };
    report.add(finding);
    Ok(())
}
