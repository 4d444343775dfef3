//! Sterna's own format: files of real programs come back byte for byte, and damage is found.

use std::path::{Path, PathBuf};

use sterna_image::convert::{ConvertOptions, Converted, FrameOptions, Input, Output, convert};
use sterna_image::tools::repair::{RepairTo, repair};
use sterna_image::tools::verify::{VerifyOptions, verify, verify_with};
use sterna_image::{Access, Format, Image, ImageError, Key, LegacyWriter, PageVisitor, StoreError};
use sterna_wire::PAGE_SIZE;

use crate::common::{Ram, content, cut_down, machine, vector};

fn run(from: &Path, to: &Path, options: &ConvertOptions) -> Result<Converted, ImageError> {
    convert(Input::File(from.into()), Output::File(to.into()), options)
}

fn to(format: Format) -> ConvertOptions {
    ConvertOptions { target: Some(format), threads: 2, ..ConvertOptions::default() }
}

fn put(directory: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn file_of_a_program_comes_back_byte_for_byte() {
    let vectors: Vec<(&str, Vec<u8>, Format)> = vec![
        ("file-mapped-ram", vector("file-mapped-ram"), Format::MappedRam),
        ("file-legacy", vector("file-legacy"), Format::Legacy),
        ("qemu10-virtio-mem-legacy", cut_down("qemu10-virtio-mem-legacy"), Format::Legacy),
        ("dirty-bitmaps-legacy", cut_down("dirty-bitmaps-legacy"), Format::Legacy),
    ];
    let directory = tempfile::tempdir().unwrap();
    for (name, bytes, format) in vectors {
        for extent_bytes in [64 << 10, 2 << 20] {
            let source = put(directory.path(), name, &bytes);
            let (there, again, back) = (
                directory.path().join("there"),
                directory.path().join("again"),
                directory.path().join("back"),
            );
            let frames = FrameOptions { extent_bytes, ..FrameOptions::default() };
            run(&source, &there, &ConvertOptions { frames, ..to(Format::Sterna) }).unwrap();
            run(&there, &again, &to(Format::Sterna)).unwrap();

            for image in [&there, &again] {
                let done = run(image, &back, &to(format)).unwrap();
                assert_eq!((done.from, done.to), (Format::Sterna, format), "{name}");
                assert!(std::fs::read(&back).unwrap() == bytes, "{name}, extents of {extent_bytes}");
                std::fs::remove_file(&back).unwrap();
            }
            assert!(there.metadata().unwrap().len() < bytes.len() as u64, "{name}");
            std::fs::remove_file(there).unwrap();
            std::fs::remove_file(again).unwrap();
        }
    }
}

#[test]
fn stream_of_a_program_goes_to_a_pipe_byte_for_byte() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = vector("file-legacy");
    let source = put(directory.path(), "source", &bytes);
    let (there, piped) = (directory.path().join("there"), directory.path().join("piped"));
    run(&source, &there, &to(Format::Sterna)).unwrap();
    let pipe = Output::Pipe(Box::new(std::fs::File::create(&piped).unwrap()));

    // The bytes in a pipe cannot be taken back, so the stream is checked first: as a stream, not as the view.
    let done = convert(Input::File(there), pipe, &to(Format::Legacy)).unwrap();

    assert_eq!(done.damage, []);
    assert!(std::fs::read(&piped).unwrap() == bytes);
}

#[test]
fn libvirt_images_come_back_byte_for_byte() {
    let directory = tempfile::tempdir().unwrap();
    let source = put(directory.path(), "source", &vector("file-legacy"));
    let xml = b"<domain type='qemu'>\n  <name>golden</name>\n</domain>\n".to_vec();
    for format in [Format::LibvirtRaw, Format::LibvirtSparse] {
        let (image, there, back) = (
            directory.path().join(format.name()),
            directory.path().join("there"),
            directory.path().join("back"),
        );
        let cookie = Some(b"<cookie/>".to_vec());
        run(&source, &image, &ConvertOptions { xml: Some(xml.clone()), cookie, ..to(format) }).unwrap();
        run(&image, &there, &to(Format::Sterna)).unwrap();

        let opened = Image::open(&there).unwrap();
        assert_eq!(opened.libvirt_header().map(|header| &header.xml), Some(&xml));
        run(&there, &back, &to(format)).unwrap();
        assert!(std::fs::read(&back).unwrap() == std::fs::read(&image).unwrap(), "{format}");
        std::fs::remove_file(there).unwrap();
        std::fs::remove_file(back).unwrap();
    }
}

#[test]
fn stream_with_several_contents_of_a_page_has_its_last_one() {
    let directory = tempfile::tempdir().unwrap();
    let shape = machine();
    let mut writer = LegacyWriter::new(Vec::new(), "memory", &shape).unwrap();
    let mut ram = Ram::of(&shape);
    for (block, page, fill) in
        [(0, 0, 1), (0, 1, 2), (0, 2, 0), (1, 0, 3), (1, 1, 4), (0, 2, 5), (0, 0, 0), (1, 1, 6), (0, 1, 7)]
    {
        let page_content = if fill == 0 { [0; PAGE_SIZE] } else { [fill; PAGE_SIZE] };
        for to in [&mut writer as &mut dyn PageVisitor, &mut ram] {
            match fill {
                0 => to.zero(block, page, 1).unwrap(),
                _ => to.pages(block, page, &page_content).unwrap(),
            }
        }
    }
    let source = put(directory.path(), "live", &writer.finish(&shape).unwrap());
    let (there, back) = (directory.path().join("there"), directory.path().join("back"));

    run(&source, &there, &to(Format::Sterna)).unwrap();

    assert_eq!(Ram::read(&Image::open(&there).unwrap()).unwrap(), ram);
    assert!(verify(&there, &VerifyOptions::default()).unwrap().is_sound());
    run(&there, &back, &to(Format::Legacy)).unwrap();
    assert_eq!(Ram::read(&Image::open(&back).unwrap()).unwrap(), ram);
}

#[test]
fn layer_of_an_image_has_only_its_pages_and_reads_like_the_whole() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let shape = machine();
    let mut writer = LegacyWriter::new(Vec::new(), "memory", &shape).unwrap();
    for (block, pages) in [(0, 3), (1, 2)] {
        for page in 0..pages {
            let changed = if (block, page) == (1, 1) { [9; PAGE_SIZE] } else { content(block, page) };
            writer.pages(block, page, &changed).unwrap();
        }
    }
    let now = put(directory.path(), "now", &writer.finish(&shape).unwrap());
    let before = put(directory.path(), "before", &crate::common::legacy(&shape));
    run(&before, &path("base"), &to(Format::Sterna)).unwrap();
    let frames = FrameOptions { base: Some(path("base")), ..FrameOptions::default() };
    run(&now, &path("layer"), &ConvertOptions { frames, ..to(Format::Sterna) }).unwrap();

    let image = Image::open(&path("layer")).unwrap();
    assert_eq!(image.stored().map(|stored| (stored.layers(), stored.held_pages())), Some((2, 1)));
    assert_eq!(Ram::read(&image).unwrap(), Ram::read(&Image::open(&now).unwrap()).unwrap());
    assert!(verify(&path("layer"), &VerifyOptions::default()).unwrap().is_sound());
    run(&path("layer"), &path("back"), &to(Format::Legacy)).unwrap();
    let (back, wanted) = (std::fs::read(path("back")).unwrap(), std::fs::read(&now).unwrap());
    let at = back.iter().zip(&wanted).position(|(a, b)| a != b);
    assert!(back == wanted, "{at:?} of {} and {}", back.len(), wanted.len());

    std::fs::remove_file(path("base")).unwrap();
    let missing = Image::open(&path("layer")).unwrap_err();
    assert!(matches!(missing, ImageError::Store(StoreError::BaseMissing { .. })), "{missing}");
}

#[test]
fn key_is_needed_for_every_tool_and_a_wrong_one_is_no_damage() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let source = put(directory.path(), "source", &vector("file-legacy"));
    let key = Key::new([5; 32]);
    let frames = FrameOptions { key: Some(key.clone()), ..FrameOptions::default() };
    run(&source, &path("image"), &ConvertOptions { frames, ..to(Format::Sterna) }).unwrap();
    let access = |key| Access { key: Some(key), ..Access::default() };

    let refused = Image::open(&path("image")).unwrap_err();
    assert!(matches!(refused, ImageError::Store(StoreError::KeyNeeded { .. })), "{refused}");
    let wrong =
        verify_with(&path("image"), &VerifyOptions::default(), &access(Key::new([6; 32]))).unwrap_err();
    assert!(matches!(wrong, ImageError::Store(StoreError::WrongKey { .. })), "{wrong}");
    assert!(verify_with(&path("image"), &VerifyOptions::default(), &access(key.clone())).unwrap().is_sound());
    let options = ConvertOptions { access: access(key), ..to(Format::Legacy) };
    run(&path("image"), &path("back"), &options).unwrap();
    assert!(std::fs::read(path("back")).unwrap() == vector("file-legacy"));
}

#[test]
fn each_changed_byte_is_a_finding_of_verify() {
    let directory = tempfile::tempdir().unwrap();
    let source = put(directory.path(), "source", &crate::common::legacy(&machine()));
    let image = directory.path().join("image");
    run(&source, &image, &to(Format::Sterna)).unwrap();
    let bytes = std::fs::read(&image).unwrap();
    let options = VerifyOptions { threads: 1, digest: false };
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0x41;
        let verdict =
            sterna_image::tools::verify::verify_source(std::sync::Arc::new(changed), "changed", &options);
        match verdict {
            Ok(verdict) => assert!(!verdict.is_sound(), "byte {at}"),
            // The magic and the version: the file is no image of this version.
            Err(error) => assert!(at < 12, "byte {at}: {error}"),
        }
    }
}

#[test]
fn frame_that_is_damaged_is_named_and_repair_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let source = put(directory.path(), "source", &vector("file-legacy"));
    let image = directory.path().join("image");
    run(&source, &image, &to(Format::Sterna)).unwrap();
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[200] ^= 1;
    std::fs::write(&image, bytes).unwrap();

    let verdict = verify(&image, &VerifyOptions::default()).unwrap();
    assert!(verdict.has("frame") && verdict.kind == "sterna", "{:?}", verdict.findings);
    let refused = repair(&image, &RepairTo::Itself, &VerifyOptions::default()).unwrap_err();
    assert!(matches!(refused, ImageError::Request(_)), "{refused}");
    let back = run(&image, &directory.path().join("back"), &to(Format::MappedRam)).unwrap_err();
    assert!(matches!(back, ImageError::Store(StoreError::Frame { .. })), "{back}");
    assert!(!directory.path().join("back").exists());
}
