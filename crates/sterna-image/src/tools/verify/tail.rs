//! Checks the stream after the block list: RAM's other sections, the devices, EOF, the description.

use std::ops::Range;

use sterna_wire::ram::flags;

use super::blocks::BlockList;
use super::head::Head;
use super::report::Report;
use super::window::{Window, be32, be64};
use crate::ImageError;
use crate::model::OPAQUE_BYTES;
use crate::tools::description::Description;
use crate::tools::finding::{Finding, Place};
use crate::tools::sections::{self, BareEnd, Stop, Walk};

const ORDER: &str = "specs/mapped-ram.md §1.4";
const DESCRIPTION: &str = "specs/mapped-ram.md §1.6";
const EVILS: &str = "specs/mapped-ram.md §6.5";

/// How the stream ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tail {
    /// Whether the stream has RAM's END section.
    pub(super) has_end: bool,
    /// Whether any byte follows the block list.
    pub(super) is_there: bool,
    /// Whether a device follows RAM.
    pub(super) has_devices: bool,
    /// Whether the walk through the sections reached EOF.
    pub(super) has_eof: bool,
}

/// Reads the stream to the end of the file and adds findings.
pub(super) fn examine(
    window: &Window<'_>,
    head: &Head,
    list: &BlockList,
    report: &mut Report,
) -> Result<Tail, ImageError> {
    let Some(start) = list.end else { return Ok(Tail::default()) };
    let bytes = window.get(start, OPAQUE_BYTES)?;
    if bytes.is_empty() {
        return Ok(Tail::default());
    }
    if !list.has_footers {
        let what = "sections have no footers: the devices cannot be separated";
        report.add(Finding::note("no-footers", "specs/mapped-ram.md §1.3", Place::byte(start), what));
        let has_eof = bare_end(window, &bytes, report);
        return Ok(Tail {
            has_end: true,
            is_there: true,
            has_devices: bytes.first() == Some(&0x04),
            has_eof,
        });
    }
    Ok(Examiner { start, bytes: &bytes, head, list, report }.examine())
}

/// Whether a tail without footers certainly ends with EOF.
fn bare_end(window: &Window<'_>, bytes: &[u8], report: &mut Report) -> bool {
    let end = sections::bare_end(bytes);
    match end {
        BareEnd::Described => {}
        BareEnd::Unsure => report.add(end_unknown(Place::byte(window.length))),
        BareEnd::Cut => report.add(
            Finding::error(
                "no-eof",
                EVILS,
                Place::byte(window.length),
                "the stream ends without its EOF byte",
            )
            .effect("QEMU stops when it loads this")
            .remedy("Use a complete copy of the file"),
        ),
    }
    end == BareEnd::Described
}

/// The finding for an end that cannot be determined.
///
/// Without footers and description, the last zero byte may be EOF or a device's byte.
pub(super) fn end_unknown(place: Place) -> Finding {
    let what = "the sections have no footers, and the stream has no description: it is unknown whether it is complete";
    Finding::warning("end-unknown", DESCRIPTION, place, what)
        .effect("QEMU stops when it loads this, if it is incomplete")
        .remedy("Compare its length with that of the original")
}

struct Examiner<'a, 'r> {
    start: u64,
    bytes: &'a [u8],
    head: &'a Head,
    list: &'a BlockList,
    report: &'r mut Report,
}

impl Examiner<'_, '_> {
    fn examine(mut self) -> Tail {
        let ram = self.list.section_id;
        let (head, bytes) = (self.head, self.bytes);
        let walk =
            |description: Option<&Description>| sections::walk_behind(&head.early, ram, bytes, description);
        // Walk twice: the first walk uses footers and leads to EOF and the description. The second walk uses the
        // exact lengths in the description.
        let blind = walk(None);
        let text = match blind.1.stop {
            Stop::Eof(eof) => self.text_behind(eof),
            _ => self.text_at_the_end(),
        };
        let description = text.as_ref().and_then(|text| self.description(text));
        let (early, walk) = if description.is_some() { walk(description.as_ref()) } else { blind };
        let first = early.sections.len();
        self.flaws(&early, self.head.early_offset);
        self.flaws(&walk, self.start);
        let has_end = self.ram_parts(&walk);
        let has_eof = match walk.stop {
            Stop::Eof(eof) => {
                self.behind_eof(eof, text.as_ref());
                if let Some(description) = &description {
                    self.undescribed(description, first + walk.sections.len(), text.as_ref());
                }
                true
            }
            Stop::Whole => {
                let what = "the stream ends without its EOF byte: the file is truncated between two sections";
                let place = Place::byte(self.start + self.bytes.len() as u64);
                self.report.add(
                    Finding::error("no-eof", EVILS, place, what)
                        .effect("QEMU stops: \"Failed to load section ID\"")
                        .remedy("Use a complete copy of the file"),
                );
                false
            }
            Stop::Lost(_) => false,
        };
        // Sections that QEMU 10.0 writes between RAM's START and its first PART are not devices after RAM.
        let behind =
            walk.parts.iter().filter(|part| part.id == ram).map(|part| part.offset).max().unwrap_or(0);
        let has_devices = walk.sections.iter().any(|section| section.offset >= behind);
        Tail { has_end, is_there: true, has_devices, has_eof }
    }

    fn flaws(&mut self, walk: &Walk, base: u64) {
        for flaw in &walk.flaws {
            let place = Place::byte(base + flaw.offset as u64);
            self.report.add(if flaw.in_description {
                Finding::error("description-disagrees", DESCRIPTION, place, flaw.what.clone())
                    .effect("QEMU does not compare them; one of the two is damaged")
            } else {
                Finding::error("devices", EVILS, place, flaw.what.clone())
                    .effect("QEMU stops when it loads the device, or before")
                    .remedy("Use a good copy of the file")
            });
        }
    }

    /// Checks that RAM's other sections are empty, as mapped-ram requires. Returns whether END is among them.
    fn ram_parts(&mut self, walk: &Walk) -> bool {
        let mut has_end = false;
        for part in walk.parts.iter().filter(|part| part.id == self.list.section_id) {
            has_end |= part.is_end;
            let word = be64(self.bytes, part.offset + 5);
            if part.body_bytes != 8 || word != Some(flags::EOS) {
                let word = word.unwrap_or(0);
                let what = format!(
                    "a section of RAM contains the record {word:#x}, but must be empty in this format"
                );
                let place = Place::byte(self.start + part.offset as u64 + 5);
                self.report.add(
                    Finding::error("page-record", "specs/mapped-ram.md §4.1", place, what)
                        .effect("QEMU stops: \"Unexpected RAM flags\""),
                );
            }
        }
        has_end
    }

    /// Range of the text after the EOF that ends at `eof`; none if truncated.
    fn text_behind(&self, eof: usize) -> Option<Range<usize>> {
        let rest = self.bytes.get(eof..)?;
        let length = be32(rest, 1).filter(|_| rest.first() == Some(&0x06))? as usize;
        let start = eof + 5;
        let end = start.checked_add(length)?;
        (end <= self.bytes.len()).then_some(start..end)
    }

    /// Range of the text after the last `00 06` whose length reaches the file's end.
    fn text_at_the_end(&self) -> Option<Range<usize>> {
        let last = self.bytes.len().checked_sub(7)?;
        (0..=last).rev().find_map(|at| {
            let is_start = self.bytes[at..].starts_with(&[0, 6]) && self.bytes[at + 6] == b'{';
            let length = be32(self.bytes, at + 2)? as usize;
            (is_start && at + 6 + length == self.bytes.len()).then(|| at + 6..self.bytes.len())
        })
    }

    fn description(&mut self, text: &Range<usize>) -> Option<Description> {
        if text.is_empty() {
            return None;
        }
        let place = Place::byte(self.start + text.start as u64);
        let parsed = Description::parse(&self.bytes[text.clone()]).map_err(|error| error.rule.into_owned());
        match parsed {
            Ok(description) => {
                self.configuration(&description, &place);
                Some(description)
            }
            Err(why) => {
                let finding =
                    Finding::error("description", DESCRIPTION, place, format!("it cannot be read: {why}"));
                self.report.add(finding.effect("QEMU ignores it; tools that read images use it"));
                None
            }
        }
    }

    fn configuration(&mut self, description: &Description, place: &Place) {
        let names = description.configuration_subsections();
        let told = description.configuration_bytes();
        // QEMU describes several capabilities as an array of equal lengths. Then the described length is not exact.
        let differs = names != self.head.subsections
            || (self.head.capabilities < 2 && told != self.head.configuration_bytes);
        if self.head.configuration_bytes > 0 && told > 0 && differs {
            let what = format!(
                "it describes a configuration of {told} bytes, but the file's configuration has {} bytes: a converter \
                 changed only one of them",
                self.head.configuration_bytes
            );
            self.report.add(
                Finding::warning("description-configuration", DESCRIPTION, place.clone(), what)
                    .effect("QEMU loads it; tools that use the description read wrong bytes")
                    .remedy("`sterna convert` rewrites it"),
            );
        }
    }

    /// Adds a finding for devices that only the description contains.
    fn undescribed(&mut self, description: &Description, found: usize, text: Option<&Range<usize>>) {
        if let Some(device) = description.devices().get(found) {
            let count = description.devices().len() - found;
            let what = format!("{count} devices in it are not in the stream; the first is {:?}", device.name);
            let at = self.start + text.map_or(0, |text| text.start as u64);
            self.report.add(
                Finding::error("description-disagrees", DESCRIPTION, Place::byte(at), what)
                    .effect("QEMU does not compare them; sections may have been lost"),
            );
        }
    }

    /// Checks the bytes after EOF.
    fn behind_eof(&mut self, eof: usize, text: Option<&Range<usize>>) {
        let rest = &self.bytes[eof..];
        let place = Place::byte(self.start + eof as u64);
        if let Some(text) = text {
            let junk = self.bytes.len() - text.end;
            if junk > 0 {
                let place = Place::byte(self.start + text.end as u64);
                let what = format!("{junk} bytes follow the end of the stream");
                let finding = Finding::warning("trailing", DESCRIPTION, place, what);
                self.report.add(finding.effect("QEMU ignores them"));
            }
            return;
        }
        if rest.is_empty() {
            let what = "the file ends at EOF, without a description: the machine leaves it out (suppress-vmdesc), or \
                        the file was truncated exactly here";
            self.report.add(
                Finding::warning("no-description", DESCRIPTION, place, what)
                    .effect("QEMU loads it; over the network it would wait for the description"),
            );
        } else if rest[0] == 0x06 {
            self.report.add(
                Finding::error("description-cut", EVILS, place, "the file ends inside the description")
                    .effect("QEMU loads it without an error: RAM and devices are complete")
                    .remedy("Use a complete copy of the file, or `sterna convert --force-damaged` it, which leaves the description out"),
            );
        } else {
            let what = format!("{} bytes follow EOF and are not a description", rest.len());
            let finding = Finding::warning("trailing", ORDER, place, what);
            self.report.add(finding.effect("QEMU ignores them"));
        }
    }
}
