//! Verdicts about the structure: header, list of blocks, places, tail.

use sterna_image::tools::finding::Severity;

use super::sample::{PAGE, Plan, Sample, describe, get64, put64, try_verdict, verdict};
use crate::common::vector;

/// Asserts a finding `code` with this severity, and that only errors count as damage.
#[track_caller]
fn assert_found(what: &str, bytes: Vec<u8>, code: &str, severity: Severity) {
    let verdict = verdict(bytes);
    let codes: Vec<_> = verdict.findings.iter().map(|f| (f.severity, f.code, f.to_string())).collect();
    assert!(verdict.findings.iter().any(|f| f.code == code && f.severity == severity), "{what}: {codes:#?}");
    assert_eq!(verdict.is_sound(), severity != Severity::Error, "{what}: {codes:#?}");
}

#[test]
fn verify_real_images_are_sound() {
    for name in ["file-mapped-ram", "file-legacy"] {
        let verdict = verdict(vector(name));

        assert!(verdict.is_sound(), "{name}: {:#?}", verdict.findings);
        assert_eq!(verdict.count(Severity::Warning), 0, "{name}: {:#?}", verdict.findings);
        assert!(verdict.data_pages > 0 && verdict.zero_pages > 0);
    }
}

#[test]
fn verify_sample_is_sound_without_a_finding() {
    let verdict = verdict(Plan::default().build().bytes);

    assert!(verdict.findings.is_empty(), "{:#?}", verdict.findings);
    assert_eq!((verdict.kind.as_str(), verdict.machine_type.as_str()), ("mapped-ram", "pc-i440fx-11.1"));
    assert_eq!(verdict.ram_bytes, (150 + 32 + 64 + 1) * PAGE as u64);
    assert_eq!(verdict.data_pages + verdict.zero_pages, 150 + 32 + 64 + 1);
}

#[test]
fn verify_each_wrong_header_is_named() {
    let sample = Plan::default().build();
    let at = |block: usize, offset: usize| sample.blocks[block].header + offset;
    let with = |at: usize, value: u64| sample.edited(|bytes, _| put64(bytes, at, value));
    let version = |version: u8| sample.edited(|bytes, s| bytes[s.blocks[1].header + 3] = version);
    let length = sample.bytes.len() as u64;
    for (what, bytes, code, severity) in [
        ("version 0", version(0), "header-version", Severity::Warning),
        ("version 2", version(2), "header-version", Severity::Error),
        ("page size 0", with(at(0, 4), 0), "page-size", Severity::Error),
        ("page size 2048", with(at(2, 4), 2048), "page-size", Severity::Error),
        ("page size 2^40", with(at(2, 4), 1 << 40), "page-size", Severity::Error),
        ("bitmap beyond the file", with(at(0, 12), length + 4096), "bitmap-outside", Severity::Error),
        ("bitmap at 2^63", with(at(0, 12), 1 << 63), "bitmap-outside", Severity::Error),
        ("bitmap at 0", with(at(0, 12), 0), "overlap", Severity::Error),
        ("bitmap in other pages", with(at(0, 12), sample.blocks[2].pages as u64), "overlap", Severity::Error),
        (
            "pages + 512",
            with(at(0, 20), sample.blocks[0].pages as u64 + 512),
            "pages-alignment",
            Severity::Error,
        ),
        (
            "pages + 4096",
            with(at(1, 20), sample.blocks[1].pages as u64 + 4096),
            "pages-offset",
            Severity::Error,
        ),
        (
            "pages beyond the file",
            with(at(3, 20), length.next_multiple_of(4096)),
            "pages-outside",
            Severity::Error,
        ),
        ("pages at 2^63", with(at(0, 20), 1 << 63), "pages-outside", Severity::Error),
        (
            "no place",
            sample.edited(|b, s| b[s.blocks[0].header + 12..][..16].fill(0)),
            "no-place",
            Severity::Error,
        ),
    ] {
        assert_found(what, bytes, code, severity);
    }
}

#[test]
fn verify_each_wrong_list_is_named() {
    let sample = Plan::default().build();
    let total = get64(&sample.bytes, sample.total);
    let length_at = |s: &Sample, block: usize| s.blocks[block].header - 8;
    let page = PAGE as u64;
    let longer = |block: usize, by: u64| {
        sample.edited(|bytes, s| {
            let at = length_at(s, block);
            let length = get64(bytes, at);
            put64(bytes, at, length.wrapping_add(by));
        })
    };
    let mut twice = Plan::default();
    twice.blocks[2].0 = "pc.ram";
    for (what, bytes, code) in [
        ("total too small", sample.edited(|b, s| put64(b, s.total, total - page)), "total-size"),
        ("total too large", sample.edited(|b, s| put64(b, s.total, total + page)), "total-size"),
        ("length + a page", longer(0, page), "block-list"),
        ("length − a page", longer(1, page.wrapping_neg()), "block-list"),
        ("length no multiple", longer(1, 512), "block-list"),
        ("length 2^63", longer(0, 1 << 63), "pages-outside"),
        ("name not text", sample.edited(|b, s| b[s.blocks[1].entry + 1] = 0xff), "block-list"),
        ("name empty", sample.edited(|b, s| b[s.blocks[1].entry] = 0), "block-list"),
        ("name twice", twice.build().bytes, "block-twice"),
        ("footer of another", sample.edited(|b, s| b[s.part - 1] = 9), "footer"),
        ("no ram", sample.edited(|b, s| b[s.total - 10] = b'x'), "no-ram"),
        ("page record", sample.edited(|b, s| b[s.part + 12] = 8), "page-record"),
    ] {
        assert_found(what, bytes, code, Severity::Error);
    }
}

#[test]
fn verify_wrong_pages_offset_is_named_once_and_the_rest_is_still_looked_at() {
    let sample = Plan::default().build();
    let bytes = sample.edited(|bytes, s| {
        put64(bytes, s.blocks[0].header + 20, s.blocks[0].pages as u64 + 4096);
        bytes[s.blocks[2].header + 3] = 2;
    });

    let verdict = verdict(bytes);

    assert!(verdict.has("pages-offset") && verdict.has("header-version"), "{:#?}", verdict.findings);
    let finding = verdict.findings.iter().find(|finding| finding.code == "pages-offset").unwrap();
    assert_eq!(finding.place.block.as_deref(), Some("pc.ram"));
    assert_eq!(finding.place.byte, Some(sample.blocks[0].header as u64 + 20));
}

#[test]
fn verify_each_wrong_tail_is_named() {
    let plan = Plan::default();
    let sample = plan.build();
    let cut = |at: usize| sample.bytes[..at].to_vec();
    let junk = sample.edited(|bytes, _| bytes.extend([0x55; 5000]));
    let mut other = plan.clone();
    other.devices[1].1.push(9);
    let mut more = plan.clone();
    more.devices.pop();
    let mut fewer = plan.clone();
    fewer.devices.push(("extra", vec![1; 8]));
    let converted = Plan { description: Some(describe(&plan.devices, &[])), ..plan.clone() };
    let text = Plan { description: Some("{\"devices\": [".into()), ..plan.clone() };
    for (what, bytes, code, severity) in [
        ("cut in a device", cut(sample.eof - 3), "devices", Severity::Error),
        ("cut before EOF", cut(sample.eof), "no-eof", Severity::Error),
        ("cut behind EOF", cut(sample.eof + 1), "no-description", Severity::Warning),
        ("cut in the description's head", cut(sample.eof + 4), "description-cut", Severity::Error),
        ("cut in the description", cut(sample.bytes.len() - 1), "description-cut", Severity::Error),
        ("junk behind it", junk, "trailing", Severity::Warning),
        ("a device longer than described", other.build().bytes, "description-disagrees", Severity::Error),
        ("a device described and not there", more.build().bytes, "description-disagrees", Severity::Error),
        ("a device there and not described", fewer.build().bytes, "description-disagrees", Severity::Error),
        ("description no JSON", text.build().bytes, "description", Severity::Error),
        (
            "description of another configuration",
            converted.build().bytes,
            "description-configuration",
            Severity::Warning,
        ),
    ] {
        assert_found(what, bytes, code, severity);
    }
}

#[test]
fn verify_forms_that_are_allowed_are_sound() {
    let plan = Plan::default();
    let uuid = Plan { uuid: Some([5; 16]), description: None, ..plan.clone() };
    let no_part = {
        let sample = plan.build();
        sample.edited(|bytes, s| drop(bytes.drain(s.part..s.part + 18)))
    };
    let no_command = {
        let sample = plan.build();
        sample.edited(|bytes, s| drop(bytes.drain(s.part + 18..s.part + 23)))
    };
    for (what, bytes) in [("uuid", uuid.build().bytes), ("no PART", no_part), ("no command 11", no_command)] {
        let verdict = verdict(bytes);
        assert!(verdict.is_sound(), "{what}: {:#?}", verdict.findings);
    }
}

#[test]
fn verify_image_cut_at_any_byte_is_never_sound() {
    let sample = Plan::default().build();
    let length = sample.bytes.len();
    // Every byte of the structure, and a sample of the pages.
    let in_pages =
        |at: usize| sample.blocks.iter().any(|b| (b.pages + 8..b.pages + b.count * PAGE - 8).contains(&at));
    let mut looked_at = 0;

    for at in (0..length).filter(|at| !in_pages(*at) || at % 1021 == 0) {
        let bytes = sample.bytes[..at].to_vec();
        looked_at += 1;
        match try_verdict(bytes) {
            // This cut looks exactly like an image of a machine that sends no description.
            Ok(verdict) if at == sample.eof + 1 => {
                assert!(verdict.has("no-description"), "{:#?}", verdict.findings);
            }
            Ok(verdict) => assert!(!verdict.is_sound(), "cut at {at:#x}"),
            Err(error) => assert!(at < 16, "cut at {at:#x}: {error}"),
        }
    }
    assert!(looked_at > 2000);
}

#[test]
fn verify_what_is_no_image_is_an_error_not_a_finding() {
    for bytes in [&b"\x7fELF and so on, long enough"[..], b"hello", &[0; 5000]] {
        assert!(try_verdict(bytes.to_vec()).is_err());
    }
}

#[test]
fn verify_header_and_configuration_that_are_wrong_are_named() {
    let sample = Plan::default().build();
    for (what, at, value, code) in
        [("version of the stream", 7, 2, "header"), ("length of the machine type", 9, 9, "configuration")]
    {
        let bytes = sample.edited(|bytes, _| bytes[at] = value);
        assert_found(what, bytes, code, Severity::Error);
    }
}
