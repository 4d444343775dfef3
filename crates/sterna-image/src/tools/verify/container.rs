//! Checks the start of a file: a bare or compressed stream, or libvirt's container (specs/libvirt-save.md).

use sterna_wire::Fault;
use sterna_wire::libvirt::{MAGIC_COMPLETE, MAGIC_PARTIAL, SaveHeader, is_domain_xml};
use sterna_wire::main::FileHeader;

use super::report::Report;
use super::window::Window;
use crate::ImageError;
use crate::format::{Form, Format};
use crate::tools::finding::{Finding, Place};

/// The start of a file: format, completeness, and the stream's offset.
pub(super) struct Front {
    /// The format according to container and first bytes. The form of a bare stream is not known yet.
    pub(super) format: Format,
    /// Whether libvirt finished the image; always true for bare files.
    pub(super) is_complete: bool,
    /// Whether libvirt reads the format word (only in version 2).
    has_word: bool,
    pub(super) stream_offset: u64,
}

/// The limit of XML or cookie in bytes, as in the reader.
const TEXT_BYTES: usize = 64 << 20;

/// Reads the container, if there is one, and adds findings.
pub(super) fn examine(window: &Window<'_>, report: &mut Report) -> Result<Front, ImageError> {
    let start = window.get(0, SaveHeader::BYTES)?;
    if start.starts_with(&MAGIC_COMPLETE) || start.starts_with(&MAGIC_PARTIAL) {
        return libvirt(window, &start, report);
    }
    let bare = |format| Front { format, is_complete: true, has_word: false, stream_offset: 0 };
    if start.is_empty() {
        report.add(
            Finding::error("empty", "specs/mapped-ram.md §1.1", Place::byte(0), "the file is empty")
                .effect("A save that is cancelled immediately leaves an empty file")
                .remedy("Save again"),
        );
        return Ok(bare(Format::Legacy));
    }
    if FileHeader::MAGIC.starts_with(&start[..start.len().min(4)]) {
        return Ok(bare(Format::Legacy));
    }
    let mut compressed = Format::ALL.iter().filter(|format| !format.is_libvirt() && format.is_compressed());
    match compressed.find(|format| start.starts_with(format.magic())) {
        Some(format) => Ok(bare(*format)),
        None => {
            let magic = format!("{:?}", String::from_utf8_lossy(&start[..start.len().min(16)]));
            Err(ImageError::Unknown { file: window.name.to_owned(), magic })
        }
    }
}

fn libvirt(window: &Window<'_>, start: &[u8], report: &mut Report) -> Result<Front, ImageError> {
    let is_complete = start.starts_with(&MAGIC_COMPLETE);
    if !is_complete {
        report.add(
            Finding::error(
                "unfinished",
                "specs/libvirt-save.md §4.1",
                Place::byte(0),
                "libvirt never finished this image: its magic is LibvirtQemudPart",
            )
            .effect("libvirt refuses it: \"save image is incomplete\"")
            .remedy("Save again; a failed save does not stop the guest permanently"),
        );
    }
    let mut front =
        Front { format: Format::LibvirtRaw, is_complete, has_word: false, stream_offset: window.length };
    report.verdict.kind = "libvirt".into();
    let header = match SaveHeader::decode(start) {
        Ok(Some((header, _))) => header,
        Ok(None) => {
            let what = "the file ends inside libvirt's header";
            report.add(
                Finding::error("truncated", "specs/libvirt-save.md §1.1", Place::byte(window.length), what)
                    .remedy("Use a complete copy of the file"),
            );
            return Ok(front);
        }
        Err(error) if error.fault == Fault::PeerIncompatible => {
            return Err(ImageError::Unsupported {
                file: window.name.to_owned(),
                rule: error.rule.into_owned(),
                paragraph: error.paragraph,
            });
        }
        Err(error) => {
            report.add(
                Finding::error("libvirt-header", error.paragraph, Place::byte(error.offset), error.rule)
                    .effect("libvirt refuses it"),
            );
            return Ok(front);
        }
    };
    front.has_word = header.version == 2;
    if let Some(format) = Format::of_number(header.format).filter(|_| front.has_word) {
        front.format = format;
    }
    if header.stream_offset() > window.length {
        let length = header.data_length;
        report.add(
            Finding::error(
                "truncated",
                "specs/libvirt-save.md §4.3",
                Place::byte(20),
                format!(
                    "{length} bytes of XML and cookie are announced, but the file ends at byte {:#x}",
                    window.length
                ),
            )
            .effect("libvirt refuses it: \"failed to read cookie\"")
            .remedy("Use a complete copy of the file"),
        );
        return Ok(front);
    }
    front.stream_offset = header.stream_offset();
    texts(window, &header, start, report)?;
    Ok(front)
}

/// Checks XML, cookie, and the unused words of the header.
fn texts(
    window: &Window<'_>,
    header: &SaveHeader,
    start: &[u8],
    report: &mut Report,
) -> Result<(), ImageError> {
    const AREA: &str = "specs/libvirt-save.md §1.2";
    let first = SaveHeader::BYTES as u64;
    let area = window.get(first, (header.xml_area() as usize).min(TEXT_BYTES))?;
    match area.iter().position(|byte| *byte == 0) {
        None if header.xml_area() as usize > TEXT_BYTES => {
            report.add(endless("xml", first, "the domain XML"));
        }
        None => report.add(
            Finding::error("xml", AREA, Place::byte(first), "the domain XML does not end with a NUL")
                .effect("libvirt refuses it: the XML cannot be parsed")
                .remedy("Restore the XML with `virsh save-image-define`"),
        ),
        Some(end) => {
            if !is_domain_xml(&area[..end]) {
                let what = "the XML is not a <domain> element";
                report.add(
                    Finding::error("xml", AREA, Place::byte(first), what)
                        .effect("libvirt refuses it: the XML cannot be parsed")
                        .remedy("Restore the XML with `virsh save-image-define`"),
                );
            }
        }
    }
    if header.cookie_offset != 0 && header.cookie_offset != header.data_length {
        let at = first + u64::from(header.cookie_offset);
        let room = (header.data_length - header.cookie_offset) as usize;
        let area = window.get(at, room.min(TEXT_BYTES))?;
        if !area.contains(&0) && room > TEXT_BYTES {
            report.add(endless("cookie", at, "the cookie"));
        } else if !area.contains(&0) {
            let what = "the cookie does not end with a NUL";
            report.add(Finding::error("cookie", AREA, Place::byte(at), what).effect("libvirt refuses it"));
        }
    }
    if header.was_running > 1 {
        let what = format!("the word \"was running\" is {}, not 0 or 1", header.was_running);
        report.add(
            Finding::note("was-running", "specs/libvirt-save.md §1.1", Place::byte(24), what)
                .effect("libvirt starts the guest, as for 1"),
        );
    }
    if start[36..SaveHeader::BYTES].iter().any(|byte| *byte != 0) {
        let what = "unused words of the header are not 0";
        report.add(
            Finding::note("unused-words", "specs/libvirt-save.md §1.1", Place::byte(36), what)
                .effect("libvirt ignores them"),
        );
    }
    Ok(())
}

/// A text that does not end within the memory limit.
fn endless(code: &'static str, at: u64, what: &str) -> Finding {
    let what =
        format!("{what} has no NUL within {TEXT_BYTES} bytes, which is longer than any text of libvirt");
    Finding::error(code, "specs/libvirt-save.md §1.2", Place::byte(at), what)
        .effect("libvirt refuses it, or runs out of memory")
        .remedy("The length word or the texts were changed: use a good copy of the file")
}

/// Checks that the format word matches the stream's form.
pub(super) fn check_format(front: &Front, form: Form, report: &mut Report) {
    let format = front.format;
    if front.has_word && format.form() != form && !format.is_compressed() {
        let is = if form == Form::Mapped { "mapped-ram" } else { "a legacy stream" };
        let what = format!("the format word is {}, but the stream is {is}", format.word());
        report.add(
            Finding::error("format-word", "specs/libvirt-save.md §2", Place::byte(28), what)
                .effect("QEMU refuses the stream: capability mapped-ram differs")
                .remedy("Set the format word to the stream's format"),
        );
    }
}
