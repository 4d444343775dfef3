//! Verdicts about libvirt's container, compressed streams and legacy streams.

use std::io::Write;
use std::sync::Arc;

use sterna_image::tools::finding::Severity;
use sterna_image::{Image, ImageError};

use super::sample::{Plan, Sample, put64, try_verdict, verdict};
use crate::common::vector;

const XML: &[u8] = b"<domain type='qemu'><name>g</name></domain>\n\0";
const COOKIE: &[u8] = b"<cookie/>\n\0";

/// Header, XML, cookie and some padding. A stream of this format follows.
fn front(format: u32) -> Vec<u8> {
    let padding = 1000;
    let mut front = b"LibvirtQemudSave".to_vec();
    let length = (XML.len() + COOKIE.len() + padding) as u32;
    for word in [2, length, 1, format, XML.len() as u32] {
        front.extend(word.to_le_bytes());
    }
    front.resize(92, 0);
    front.extend(XML);
    front.extend(COOKIE);
    front.resize(front.len() + padding, 0);
    front
}

fn sparse() -> Sample {
    Plan { front: front(6), ..Plan::default() }.build()
}

fn with(format: u32, stream: &[u8]) -> Vec<u8> {
    [front(format), stream.to_vec()].concat()
}

#[test]
fn verify_containers_of_all_forms_are_sound() {
    let legacy = vector("file-legacy");
    let gzip = gzip(&legacy);

    for (bytes, kind) in [
        (sparse().bytes, "libvirt-sparse"),
        (with(0, &legacy), "libvirt-raw"),
        (with(1, &gzip), "libvirt-gzip"),
        (gzip.clone(), "legacy-gzip"),
        (legacy, "legacy"),
    ] {
        let verdict = verdict(bytes);
        assert!(verdict.is_sound(), "{kind}: {:#?}", verdict.findings);
        assert_eq!(verdict.kind, kind);
        assert!(verdict.data_pages > 0);
    }
}

#[test]
fn verify_each_wrong_container_is_named() {
    let sample = sparse();
    let legacy = vector("file-legacy");
    let edit = |at: usize, value: u8| sample.edited(|bytes, _| bytes[at] = value);
    let part = sample.edited(|bytes, _| bytes[12..16].copy_from_slice(b"Part"));
    let endless = sample.edited(|bytes, _| {
        let end = 92 + XML.len();
        bytes[end - 1] = b'x';
    });
    for (what, bytes, code, severity) in [
        ("Part", part, "unfinished", Severity::Error),
        ("no length", sample.edited(|b, _| b[20..24].fill(0)), "libvirt-header", Severity::Error),
        ("length beyond the file", edit(23, 0x7f), "truncated", Severity::Error),
        ("cookie beyond the length", edit(35, 1), "libvirt-header", Severity::Error),
        ("XML not ended", endless, "xml", Severity::Error),
        ("XML is something else", edit(93, b'x'), "xml", Severity::Error),
        ("sparse that is raw", with(6, &legacy), "format-word", Severity::Error),
        ("raw that is sparse", edit(28, 0), "format-word", Severity::Error),
        ("running 2", edit(24, 2), "was-running", Severity::Note),
        ("unused word", edit(40, 1), "unused-words", Severity::Note),
        ("cut in the header", sample.bytes[..50].to_vec(), "truncated", Severity::Error),
        ("cut behind the XML", sample.bytes[..92 + XML.len() + 3].to_vec(), "truncated", Severity::Error),
        ("cut before the stream", sample.bytes[..front(6).len()].to_vec(), "truncated", Severity::Error),
    ] {
        let verdict = verdict(bytes);
        assert!(
            verdict.findings.iter().any(|f| f.code == code && f.severity == severity),
            "{what}: {:#?}",
            verdict.findings
        );
        assert_eq!(verdict.is_sound(), severity != Severity::Error, "{what}");
    }
}

#[test]
fn bitmap_among_the_containers_texts_is_an_overlap_for_both_readers() {
    let sample = sparse();
    let bytes = sample.edited(|bytes, s| put64(bytes, s.blocks[0].header + 12, 200));

    let verdict = verdict(bytes.clone());
    let refused = Image::open_source(Arc::new(bytes), "sample");

    assert!(verdict.has("overlap"), "{:#?}", verdict.findings);
    assert!(matches!(refused, Err(ImageError::Broken { .. })), "{refused:?}");
}

#[test]
fn verify_versions_and_formats_that_nobody_knows_are_refused() {
    let sample = sparse();
    for (at, value) in [(16, 3), (28, 7)] {
        let error = try_verdict(sample.edited(|bytes, _| bytes[at] = value)).unwrap_err();

        assert!(error.to_string().contains(&value.to_string()), "{error}");
    }
}

#[test]
fn verify_damaged_compression_is_named() {
    let compressed = gzip(&vector("file-legacy"));
    let cut = compressed[..compressed.len() - 9].to_vec();
    let mut flipped = compressed.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 0x10;
    let mut sum = compressed.clone();
    let last = sum.len() - 6;
    sum[last] ^= 1;

    for (what, bytes) in [("cut", cut), ("flipped", flipped), ("check sum", sum)] {
        let verdict = verdict(bytes);
        assert!(!verdict.is_sound(), "{what}: {:#?}", verdict.findings);
    }
}

#[test]
fn verify_legacy_stream_cut_anywhere_is_never_sound() {
    let bytes = vector("file-legacy");
    let length = bytes.len();
    let tail = 130_000;

    let cuts = (0..length - tail).step_by(40_009).chain((length - tail..length).step_by(4001));
    for at in cuts {
        match try_verdict(bytes[..at].to_vec()) {
            Ok(verdict) => assert!(!verdict.is_sound() || verdict.has("no-description"), "cut at {at}"),
            Err(error) => assert!(at < 16, "cut at {at}: {error}"),
        }
    }
}

#[test]
fn verify_legacy_stream_with_a_page_left_out_is_a_warning() {
    let bytes = vector("file-legacy");
    // The last zero page with CONTINUE: nine bytes that no other record depends on.
    let zero = (0..bytes.len() - 17)
        .rev()
        .find(|at| {
            let word = u64::from_be_bytes(bytes[*at..at + 8].try_into().unwrap());
            let next = u64::from_be_bytes(bytes[at + 9..at + 17].try_into().unwrap());
            word & 0xfff == 0x22 && bytes[at + 8] == 0 && next == (word & !0xfff) + 0x1022 && word < 1 << 32
        })
        .unwrap();
    let mut less = bytes.clone();
    drop(less.drain(zero..zero + 9));

    let verdict = verdict(less);

    assert!(verdict.is_sound() && verdict.has("pages-missing"), "{:#?}", verdict.findings);
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}
