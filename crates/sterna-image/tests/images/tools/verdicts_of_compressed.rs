//! Damage in compressed images has two places: in the decompressed stream and in the file.

use sterna_image::tools::finding::Finding;
use sterna_image::{Compression, Image, ImageError};

use super::sample::verdict;
use crate::common::{legacy, machine};

/// A machine whose pages do not compress, so that places in both streams are comparable.
fn stream() -> Vec<u8> {
    let mut shape = machine();
    shape.ram.blocks[0].length_bytes = 1200 << 12;
    let mut writer = sterna_image::LegacyWriter::new(Vec::new(), "memory", &shape).unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    for page in 0..1200 {
        let mut content = [0; 4096];
        random.fill(&mut content);
        sterna_image::PageVisitor::pages(&mut writer, 0, page, &content).unwrap();
    }
    sterna_image::PageVisitor::zero(&mut writer, 1, 0, 2).unwrap();
    assert!(legacy(&machine()).len() < 100_000);
    writer.finish(&shape).unwrap()
}

fn compress(compression: Compression, bytes: &[u8]) -> Vec<u8> {
    let mut compressor = sterna_image::compression::Compressor::new(Vec::new(), compression, 1);
    std::io::Write::write_all(&mut compressor, bytes).unwrap();
    compressor.finish().unwrap()
}

fn finding(bytes: Vec<u8>, code: &str) -> Finding {
    let found = verdict(bytes);
    found.findings.into_iter().find(|finding| finding.code == code).expect("a finding")
}

#[test]
fn damage_that_the_codec_sees_has_its_place_in_the_file() {
    let stream = stream();
    let mut seen = 0;
    for compression in Compression::all() {
        let mut compressed = compress(compression, &stream);
        let at = compressed.len() / 2;
        compressed[at..at + 64].fill(0xff);

        let found = verdict(compressed.clone()).findings;
        // The decompressed bytes may break the stream's format before the codec compares its checksum.
        if let Some(broken) = found.iter().find(|finding| finding.code == "broken") {
            assert!(broken.what.contains("compressed in bytes"), "{compression:?}: {broken}");
            continue;
        }
        seen += 1;
        let place = finding(compressed.clone(), "packing").place;

        // The damaged block ends after the damage. No block is longer than a few MiB.
        let byte = place.byte.expect("a byte of the file");
        assert!(!place.is_decompressed, "{compression:?}");
        assert!(
            byte >= at as u64 && byte <= compressed.len() as u64,
            "{compression:?}: {byte}, damaged at {at}"
        );
    }
    assert!(seen >= 3, "{seen}");
}

#[test]
fn damage_in_the_decompressed_stream_has_both_places() {
    let mut stream = stream();
    // A word of a record in the middle.
    let at = (stream.len() / 2 - 4096..).find(|at| stream[*at..].starts_with(&[0, 0, 0, 0, 0])).unwrap();
    stream[at + 7] = 0xff;
    for compression in Compression::all() {
        let compressed = compress(compression, &stream);
        let length = compressed.len() as u64;

        let broken = finding(compressed.clone(), "broken");
        let opened = Image::open_source(std::sync::Arc::new(compressed), "compressed").unwrap_err();

        let byte = broken.place.byte.unwrap();
        assert!(
            broken.place.is_decompressed && byte.abs_diff(at as u64) < 16,
            "{compression:?}: {byte}, {at}"
        );
        assert!(matches!(opened, ImageError::Broken { offset, .. } if offset == byte));
        let text = opened.to_string();
        let (_, rest) = text.split_once("compressed in bytes ").expect("a place in the file");
        let (from, rest) = rest.split_once(" to ").unwrap();
        let (from, to): (u64, u64) =
            (from.parse().unwrap(), rest.split_once(' ').unwrap().0.parse().unwrap());
        assert!(from < to && to <= length && to - from < 3 << 20, "{compression:?}: {text}");
        // Noise compresses to its own length, so the places are nearly equal.
        assert!(from < byte + (1 << 20) && byte < to + (1 << 20), "{compression:?}: {text}, {byte}");
    }
}
