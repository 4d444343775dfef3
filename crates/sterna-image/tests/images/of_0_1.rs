//! Reads images that version 0.1 wrote, in each form.
//!
//! Later versions must support them (docs/compatibility.md).
//!
//! `STERNA_WRITE_GOLDEN=1 cargo test --workspace -p sterna-image --test images of_0_1 -- --ignored` writes them. The
//! existing files are from version 0.1 and must not change. Write a file only for a form that has none yet.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::tools::verify::{VerifyOptions, verify_source};
use sterna_image::{Format, Image};

use crate::common::{Ram, legacy, machine, section};

/// The machine of `common`, but without devices whose bodies look like the ends of sections.
fn shape() -> sterna_image::Shape {
    let mut shape = machine();
    shape.early = Vec::new();
    shape.devices = [section(9, "timer", &[7; 24]), section(10, "apic", &[1; 40])].concat();
    shape
}

fn file(target: Format) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/of-0.1").join(format!("{}.gz", target.name()))
}

fn read(target: Format) -> Vec<u8> {
    let file = std::fs::File::open(file(target)).unwrap_or_else(|error| panic!("{}: {error}", target.name()));
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn image_of_0_1_in_each_form_is_read() {
    let wanted = Image::open_source(Arc::new(legacy(&shape())), "wanted").unwrap();
    for &target in Format::ALL {
        let (name, bytes) = (target.name(), read(target));

        let image = Image::open_source(Arc::new(bytes.clone()), name).unwrap();

        assert_eq!(Ram::read(&image).unwrap(), Ram::read(&wanted).unwrap(), "{name}");
        assert_eq!(image.shape().devices, wanted.shape().devices, "{name}");
        let report = verify_source(Arc::new(bytes), name, &VerifyOptions { threads: 1, digest: false });
        assert!(report.is_ok(), "{name}: {:?}", report.err());
    }
}

#[test]
#[ignore = "writes what the test above reads"]
fn record() {
    assert!(
        std::env::var_os("STERNA_WRITE_GOLDEN").is_some(),
        "set STERNA_WRITE_GOLDEN=1 to write the images"
    );
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("source");
    std::fs::write(&source, legacy(&shape())).unwrap();
    for &target in Format::ALL.iter().filter(|target| !file(**target).exists()) {
        let place = directory.path().join(target.name());
        let xml = target.is_libvirt().then(|| b"<domain><name>a</name></domain>".to_vec());
        let options = ConvertOptions { target: Some(target), xml, threads: 1, ..ConvertOptions::default() };
        convert(Input::File(source.clone()), Output::File(place.clone()), &options).unwrap();
        std::fs::create_dir_all(file(target).parent().unwrap()).unwrap();
        let compressed = std::fs::File::create(file(target)).unwrap();
        let mut compressed = flate2::write::GzEncoder::new(compressed, flate2::Compression::best());
        compressed.write_all(&std::fs::read(place).unwrap()).unwrap();
        compressed.finish().unwrap();
    }
}
