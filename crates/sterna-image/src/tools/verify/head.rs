//! Checks the header, the configuration and the sections before RAM.

use sterna_wire::main::{Configuration, FileHeader};

use super::report::Report;
use super::window::{Window, be64};
use crate::ImageError;
use crate::format::Form;
use crate::model::{IGNORE_SHARED, MAPPED_RAM, OPAQUE_BYTES};
use crate::tools::finding::{Finding, Place};

/// An upper limit of a configuration's length in bytes.
const CONFIGURATION_BYTES: usize = 64 << 10;

/// The decoded stream before RAM.
#[derive(Debug, Default)]
pub(super) struct Head {
    pub(super) machine_type: String,
    pub(super) has_ignore_shared: bool,
    pub(super) stream_offset: u64,
    /// Length of the configuration in bytes without its type byte; 0 if there is none.
    pub(super) configuration_bytes: u64,
    pub(super) subsections: Vec<&'static str>,
    /// Number of capabilities in the configuration.
    pub(super) capabilities: usize,
    /// The bytes between the configuration and RAM.
    pub(super) early: Vec<u8>,
    pub(super) early_offset: u64,
    /// Offset of RAM's START section.
    pub(super) ram_offset: u64,
}

/// Whether the stream at `offset` names mapped-ram.
///
/// If the configuration cannot be decoded, the text `mapped-ram` in its bytes decides.
pub(super) fn form(window: &Window<'_>, offset: u64) -> Form {
    let Ok(bytes) = window.get(offset, CONFIGURATION_BYTES) else { return Form::Legacy };
    let configuration = bytes.get(FileHeader::BYTES..).map(Configuration::decode);
    let is_mapped = match configuration {
        Some(Ok(Some((configuration, _)))) => {
            configuration.capabilities.iter().any(|capability| capability == MAPPED_RAM)
        }
        _ => bytes.windows(MAPPED_RAM.len()).any(|window| window == MAPPED_RAM.as_bytes()),
    };
    if is_mapped { Form::Mapped } else { Form::Legacy }
}

/// Reads the stream up to RAM's START; `None` if START cannot be found.
pub(super) fn examine(
    window: &Window<'_>,
    offset: u64,
    report: &mut Report,
) -> Result<Option<Head>, ImageError> {
    let bytes = window.get(offset, CONFIGURATION_BYTES)?;
    let mut at = match FileHeader::decode(&bytes) {
        Ok(Some((_, used))) => used,
        Ok(None) => {
            report.add(truncated(window, "the header"));
            return Ok(None);
        }
        Err(error) => {
            report.add(
                Finding::error(
                    "header",
                    "specs/mapped-ram.md §1.1",
                    Place::byte(offset + error.offset),
                    error.rule,
                )
                .effect("QEMU refuses it"),
            );
            return Ok(None);
        }
    };
    let mut head = Head { stream_offset: offset, ..Head::default() };
    if bytes.get(at) == Some(&0x07) {
        match Configuration::decode(&bytes[at..]) {
            Ok(Some((configuration, used))) => {
                at += used;
                head.configuration_bytes = used as u64 - 1;
                head.subsections = subsections(&configuration);
                head.capabilities = configuration.capabilities.len();
                head.has_ignore_shared = configuration.capabilities.iter().any(|name| name == IGNORE_SHARED);
                head.machine_type = configuration.machine_type;
            }
            Ok(None) => {
                report.add(truncated(window, "the configuration"));
                return Ok(None);
            }
            Err(error) => {
                let place = Place::byte(offset + at as u64 + error.offset);
                report.add(
                    Finding::error("configuration", "specs/mapped-ram.md §1.2", place, error.rule)
                        .effect("QEMU refuses it"),
                );
                return Ok(None);
            }
        }
    }
    head.early_offset = offset + at as u64;
    find_ram(window, &mut head, report).map(|found| found.then_some(head))
}

/// Searches for RAM's START. Early sections of unknown length may precede it (§1.5).
fn find_ram(window: &Window<'_>, head: &mut Head, report: &mut Report) -> Result<bool, ImageError> {
    let mut span = 64 << 10;
    loop {
        let mut bytes = window.get(head.early_offset, span)?;
        if let Some(at) = (0..bytes.len()).find(|at| is_ram_start(&bytes, *at)) {
            bytes.truncate(at);
            head.early = bytes;
            head.ram_offset = head.early_offset + at as u64;
            return Ok(true);
        }
        if bytes.len() < span || span >= OPAQUE_BYTES {
            if window.length < head.early_offset + 31 {
                report.add(truncated(window, "the sections before RAM"));
                return Ok(false);
            }
            let what = "no section of RAM (START, name ram, instance 0, version 4) follows the configuration";
            report.add(
                Finding::error("no-ram", "specs/mapped-ram.md §1.4", Place::byte(head.early_offset), what)
                    .effect("QEMU refuses it, or loads devices without RAM"),
            );
            return Ok(false);
        }
        span *= 8;
    }
}

/// Whether RAM's START, with the first word of its body, is at `at`.
///
/// It must be at the start, after a footer, or after a command without data.
fn is_ram_start(bytes: &[u8], at: usize) -> bool {
    const NAME: &[u8] = b"\x03ram\0\0\0\0\0\0\0\x04";
    let start = &bytes[at..];
    start.first() == Some(&0x01)
        && start.get(5..17) == Some(NAME)
        && be64(start, 17).is_some_and(|word| word & 0xfff == 0x004)
        && (at == 0
            || bytes[..at].last_chunk::<5>().is_some_and(|footer| footer[0] == 0x7e)
            || is_command(bytes, at))
}

/// Whether a command without data ends at `at`.
fn is_command(bytes: &[u8], at: usize) -> bool {
    bytes[..at].last_chunk::<5>().is_some_and(|command| command[..2] == [8, 0] && command[3..] == [0, 0])
}

fn subsections(configuration: &Configuration) -> Vec<&'static str> {
    let mut names = Vec::new();
    if configuration.target_page_bits.is_some() {
        names.push("configuration/target-page-bits");
    }
    if !configuration.capabilities.is_empty() {
        names.push("configuration/capabilities");
    }
    if configuration.uuid.is_some() {
        names.push("configuration/uuid");
    }
    names
}

pub(super) fn truncated(window: &Window<'_>, what: &str) -> Finding {
    let what = format!("the file ends inside {what}");
    Finding::error("truncated", "specs/mapped-ram.md §6.5", Place::byte(window.length), what)
        .effect("QEMU stops, or with multifd crashes, when it loads this")
        .remedy("Use a complete copy of the file, or save again")
}
