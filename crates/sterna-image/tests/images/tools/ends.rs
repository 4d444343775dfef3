//! Streams whose end cannot be determined: no footers, no description.

use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::tools::finding::Severity;
use sterna_image::{Format, ImageError, MappedOptions, MappedWriter, Shape};

use super::sample::verdict;
use crate::common::{give, legacy, machine, open};

/// A machine without footers; its only device ends in a zero.
fn blind(description: bool) -> Shape {
    let mut shape = machine();
    shape.ram.footers = false;
    shape.early.clear();
    shape.devices = b"\x04\0\0\0\x09\x03cpu\0\0\0\0\0\0\0\x01registers\0".to_vec();
    shape.description = shape.description.filter(|_| description);
    shape
}

fn mapped(shape: &Shape) -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mapped");
    let writer = MappedWriter::create(&path, shape, MappedOptions::default()).unwrap();
    let mut lane = writer.lane();
    give(shape, &mut lane).unwrap();
    lane.drain().unwrap();
    writer.complete(shape).unwrap();
    std::fs::read(path).unwrap()
}

#[test]
fn stream_without_footers_and_description_is_never_said_to_be_whole() {
    let directory = tempfile::tempdir().unwrap();
    for bytes in [legacy(&blind(false)), mapped(&blind(false))] {
        // The second stream lacks its EOF, but its last byte is zero as well.
        for length in [bytes.len(), bytes.len() - 1] {
            let bytes = bytes[..length].to_vec();
            let image = open(&bytes).unwrap();
            let verdict = verdict(bytes.clone());
            let (from, to) = (directory.path().join("from"), directory.path().join("to"));
            std::fs::write(&from, &bytes).unwrap();

            assert!(image.is_end_unsure() && !image.shape().has_eof);
            let found = verdict.findings.iter().find(|finding| finding.code == "end-unknown");
            assert!(found.is_some_and(|f| f.severity == Severity::Warning), "{:#?}", verdict.findings);
            for target in ["legacy", "mapped-ram"] {
                let target: Format = target.parse().unwrap();
                let options = ConvertOptions { target: Some(target), ..ConvertOptions::default() };
                let refused = convert(Input::File(from.clone()), Output::File(to.clone()), &options);
                assert!(matches!(refused, Err(ImageError::Unsupported { .. })), "{refused:?}");
            }
        }
        let cut = verdict(bytes[..bytes.len() - 2].to_vec());
        assert!(cut.has("no-eof") && !cut.is_sound(), "{:#?}", cut.findings);
    }
}

#[test]
fn stream_without_footers_and_with_a_description_is_whole() {
    for bytes in [legacy(&blind(true)), mapped(&blind(true))] {
        let image = open(&bytes).unwrap();

        assert!(image.shape().has_eof && !image.is_end_unsure());
        let verdict = verdict(bytes);
        assert!(verdict.is_sound() && !verdict.has("end-unknown"), "{:#?}", verdict.findings);
    }
}
