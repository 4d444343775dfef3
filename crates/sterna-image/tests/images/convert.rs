//! Converts files of a real QEMU 11.1.3 through every form and back, byte for byte.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::common::{legacy, machine, vector};
use sterna_image::convert::{ConvertOptions, Converted, Input, Output, convert};
use sterna_image::tools::verify::{VerifyOptions, verify};
use sterna_image::{Format, Image, ImageError, MappedOptions, MappedWriter, Shape};
use sterna_transport::IoPart;

const XML: &[u8] = b"<domain type='qemu'>\n  <name>golden</name>\n</domain>\n";
const COOKIE: &[u8] = b"<cookie>\n</cookie>\n";

fn target(name: &str) -> ConvertOptions {
    ConvertOptions { target: Some(name.parse().unwrap()), threads: 2, ..ConvertOptions::default() }
}

fn put(directory: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn run(from: &Path, to: &Path, options: &ConvertOptions) -> Result<Converted, ImageError> {
    convert(Input::File(from.into()), Output::File(to.into()), options)
}

#[test]
fn convert_legacy_through_every_form_and_back_gives_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let golden = vector("file-legacy");
    let source = put(directory.path(), "golden", &golden);
    for &form in Format::ALL {
        let mut options = target(form.name());
        if form.is_libvirt() {
            options.xml = Some(XML.to_vec());
            options.cookie = Some(COOKIE.to_vec());
        }
        let (there, back) = (directory.path().join(form.name()), directory.path().join("back"));

        let done = run(&source, &there, &options).unwrap();
        assert_eq!((done.from, done.to), (Format::Legacy, form));
        let image = Image::open(&there).unwrap();
        assert_eq!(image.format(), form);
        if let Some(header) = image.libvirt_header() {
            assert_eq!((&header.xml[..], header.cookie.as_deref()), (XML, Some(COOKIE)));
            assert_eq!((header.version, header.is_complete), (2, true));
            let texts = XML.len() + 1 + COOKIE.len() + 1;
            assert_eq!(header.data_length as usize, texts + 65_536);
        }
        run(&there, &back, &target("legacy")).unwrap();

        assert!(fs::read(&back).unwrap() == golden, "legacy, {form}, legacy");
        fs::remove_file(&back).unwrap();
    }
}

#[test]
fn convert_with_a_description_outside_ascii_gives_the_same_bytes() {
    // The first is JSON in UTF-8. The second is not valid JSON and counts as damage. QEMU loads both, so both are
    // copied.
    let utf8 = "{\"page_size\": 4096, \"devices\": [], \"ä\": 1}".as_bytes().to_vec();
    let latin = b"{\"page_size\": 4096, \"devices\": [], \"\xe4\": 1}".to_vec();
    for (text, is_sound) in [(utf8, true), (latin, false)] {
        let directory = tempfile::tempdir().unwrap();
        let mut shape = machine();
        (shape.early, shape.devices) = (Vec::new(), Vec::new());
        shape.description = Some(text);
        let source = put(directory.path(), "source", &legacy(&shape));
        let options = VerifyOptions { threads: 1, digest: false };
        assert_eq!(verify(&source, &options).unwrap().is_sound(), is_sound);
        for form in ["mapped-ram", "legacy-zstd", "libvirt-sparse"] {
            let mut options = ConvertOptions { force_damaged: !is_sound, ..target(form) };
            options.xml = form.starts_with("libvirt").then(|| XML.to_vec());
            let (there, back) = (directory.path().join(form), directory.path().join("back"));

            run(&source, &there, &options).unwrap();
            run(&there, &back, &ConvertOptions { force_damaged: !is_sound, ..target("legacy") }).unwrap();

            assert!(fs::read(&back).unwrap() == fs::read(&source).unwrap(), "legacy, {form}, legacy");
            fs::remove_file(&back).unwrap();
        }
    }
}

#[test]
fn convert_mapped_through_every_form_and_back_gives_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let golden = vector("file-mapped-ram");
    let source = put(directory.path(), "golden", &golden);
    for &form in Format::ALL {
        let mut options = target(form.name());
        options.xml = form.is_libvirt().then(|| XML.to_vec());
        let (there, back) = (directory.path().join(form.name()), directory.path().join("back"));

        run(&source, &there, &options).unwrap();
        run(&there, &back, &target("mapped-ram")).unwrap();

        if form == Format::Sterna {
            // It keeps the VMM's bytes.
            assert!(fs::read(&back).unwrap() == golden, "{form}");
            fs::remove_file(&back).unwrap();
            continue;
        }
        // QEMU writes a PART without pages, which has no effect. The converter does not write it again.
        let (again, was) = (Image::open(&back).unwrap(), Image::open(&source).unwrap());
        assert!(again.shape() == was.shape(), "mapped-ram, {form}, mapped-ram");
        let part = 18;
        assert_eq!(fs::read(&back).unwrap().len() + part, golden.len());
        let tail = was.stream_end() as usize - was.shape().devices.len();
        assert!(fs::read(&back).unwrap()[..tail - 2000] == golden[..tail - 2000], "{form}");
        fs::remove_file(&back).unwrap();
    }
}

#[test]
fn convert_onto_a_file_is_refused_unless_forced_and_onto_itself_always() {
    let directory = tempfile::tempdir().unwrap();
    let source = put(directory.path(), "a", &vector("file-legacy"));
    let other = put(directory.path(), "b", b"something");
    let link = directory.path().join("c");
    fs::hard_link(&source, &link).unwrap();

    let refused = run(&source, &other, &target("mapped-ram")).unwrap_err();
    assert!(matches!(refused, ImageError::Exists { .. }), "{refused}");
    assert_eq!(fs::read(&other).unwrap(), b"something");
    let forced = ConvertOptions { replace: true, ..target("mapped-ram") };
    for itself in [&source, &link] {
        let refused = run(&source, itself, &forced).unwrap_err();
        assert!(matches!(refused, ImageError::SameFile { .. }), "{refused}");
    }
    run(&source, &other, &forced).unwrap();
    assert_eq!(Image::open(&other).unwrap().format().name(), "mapped-ram");
}

#[test]
fn convert_bare_image_to_libvirt_without_xml_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let source = put(directory.path(), "a", &vector("file-legacy"));

    let refused = run(&source, &directory.path().join("b"), &target("libvirt-sparse")).unwrap_err();

    assert!(refused.to_string().contains("--xml"), "{refused}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn convert_with_the_xml_of_another_machine_or_domain_is_refused_unless_forced() {
    let directory = tempfile::tempdir().unwrap();
    let source = put(directory.path(), "a", &vector("file-legacy"));
    let saved = directory.path().join("saved");
    let domain = |uuid: u8, machine: &str| {
        let text = format!(
            "<domain><uuid>5f0c8e1c-8d0e-4f3f-9a52-0c5a2f0b7d{uuid:02x}</uuid><os><type machine='{machine}'/></os></domain>"
        );
        ConvertOptions { xml: Some(text.into_bytes()), ..target("libvirt-raw") }
    };
    let machine = Image::open(&source).unwrap().shape().configuration.machine_type.clone();
    run(&source, &saved, &domain(1, &machine)).unwrap();
    let place = directory.path().join("b");
    for (from, options, word) in
        [(&source, domain(1, "pc-q35-9.9"), "pc-q35-9.9"), (&saved, domain(2, &machine), "7d02")]
    {
        let refused = run(from, &place, &options).unwrap_err();

        assert!(matches!(refused, ImageError::Request(_)) && refused.to_string().contains(word), "{refused}");
        assert!(!place.exists());
        run(from, &place, &ConvertOptions { replace: true, ..options }).unwrap();
        fs::remove_file(&place).unwrap();
    }
}

#[test]
fn convert_file_that_is_no_whole_image_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let golden = vector("file-legacy");
    for length in [0, 3, 8, 100, 5000, golden.len() - 900, golden.len() / 2] {
        let source = put(directory.path(), "cut", &golden[..length]);
        for form in ["mapped-ram", "legacy", "legacy-zstd"] {
            let failed = run(&source, &directory.path().join("out"), &target(form)).unwrap_err();

            assert!(failed.is_image_at_fault(), "{length}, {form}: {failed}");
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "{length}, {form}");
        }
    }
}

#[test]
fn convert_pipes_of_compressed_streams_give_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let golden = vector("file-legacy");
    let compressed = directory.path().join("compressed");
    let pipe = Output::Pipe(Box::new(fs::File::create(&compressed).unwrap()));
    let from = Input::Pipe(Box::new(std::io::Cursor::new(golden.clone())));
    convert(from, pipe, &target("legacy-zstd")).unwrap();

    let from = Input::Pipe(Box::new(fs::File::open(&compressed).unwrap()));
    let back = directory.path().join("back");
    convert(from, Output::File(back.clone()), &target("legacy")).unwrap();
    assert!(fs::read(back).unwrap() == golden);

    let from = Input::Pipe(Box::new(std::io::Cursor::new(vector("file-mapped-ram"))));
    let refused = convert(from, Output::File(directory.path().join("x")), &target("legacy")).unwrap_err();
    assert!(refused.to_string().contains("pipe"), "{refused}");
}

/// The stream without its container would be another image than the one that was asked for.
#[test]
fn convert_into_libvirts_container_in_a_pipe_is_refused_and_writes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let source = put(directory.path(), "golden", &vector("file-legacy"));
    for form in Format::ALL.iter().filter(|format| format.is_libvirt()) {
        let out = Kept::default();
        let options = ConvertOptions { xml: Some(XML.to_vec()), ..target(form.name()) };

        let refused = convert(Input::File(source.clone()), Output::Pipe(Box::new(out.clone())), &options);

        assert!(matches!(refused, Err(ImageError::Request(_))), "{form}: {refused:?}");
        assert_eq!(out.0.lock().unwrap().len(), 0, "{form}");
    }
}

/// Keeps all written bytes, and can be read in small pieces.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A pipe that returns at most `.1` bytes for each read.
struct Drops(std::io::Cursor<Vec<u8>>, usize);

impl Read for Drops {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let count = to.len().min(self.1);
        self.0.read(&mut to[..count])
    }
}

#[test]
fn convert_of_a_damaged_stream_into_a_pipe_gives_nothing_that_anybody_loads() {
    let directory = tempfile::tempdir().unwrap();
    for has_end in [true, false] {
        let mut shape = Shape { has_end, ..machine() };
        let sound = legacy(&shape);
        shape.description = Some(b"{\"page_size\": 4096, \"devices\": [], \"\xe4\": 1}".to_vec());
        let damaged = legacy(&shape);
        let eof = damaged.len() - shape.description.unwrap().len() - 6;
        let file = put(directory.path(), "damaged", &damaged);
        let pipe = |at_once| Input::Pipe(Box::new(Drops(std::io::Cursor::new(damaged.clone()), at_once)));

        let out = Kept::default();
        let refused =
            convert(Input::File(file.clone()), Output::Pipe(Box::new(out.clone())), &target("legacy"));
        assert!(matches!(refused, Err(ImageError::Damaged { .. })), "{refused:?}");
        assert_eq!(out.0.lock().unwrap().len(), 0, "of a file");
        for at_once in [1, 7, 100, 4096, usize::MAX] {
            let out = Kept::default();
            let refused = convert(pipe(at_once), Output::Pipe(Box::new(out.clone())), &target("legacy"));
            assert!(matches!(refused, Err(ImageError::Damaged { .. })), "{refused:?}");
            let given = out.0.lock().unwrap().clone();
            assert!(given.len() <= eof && damaged.starts_with(&given), "{} of {eof}", given.len());
            assert!(given.len() > 5 * 4096 / 2, "all but its end passes: {}", given.len());

            let out = Kept::default();
            let options = ConvertOptions { force_damaged: true, ..target("legacy") };
            convert(pipe(at_once), Output::Pipe(Box::new(out.clone())), &options).unwrap();
            assert!(*out.0.lock().unwrap() == damaged);
            let out = Kept::default();
            let whole = Input::Pipe(Box::new(Drops(std::io::Cursor::new(sound.clone()), at_once)));
            convert(whole, Output::Pipe(Box::new(out.clone())), &target("legacy")).unwrap();
            assert!(*out.0.lock().unwrap() == sound);
        }
    }
}

#[test]
fn convert_to_other_alignment_and_back_gives_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let source = put(directory.path(), "a", &vector("file-mapped-ram"));
    let (close, wide) = (directory.path().join("b"), directory.path().join("c"));
    run(&source, &close, &ConvertOptions { alignment: 4096, ..target("mapped-ram") }).unwrap();

    run(&close, &wide, &target("mapped-ram")).unwrap();

    assert_eq!(fs::metadata(&wide).unwrap().len() - fs::metadata(&close).unwrap().len(), 0xff000);
    let (a, c) = (Image::open(&source).unwrap(), Image::open(&wide).unwrap());
    assert!(a.shape() == c.shape());
    let refused =
        run(&source, &directory.path().join("d"), &ConvertOptions { alignment: 100, ..target("mapped-ram") });
    assert!(refused.unwrap_err().to_string().contains("multiple"));
}

/// An output without room, like a full disk.
struct Full(usize);

impl std::io::Write for Full {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0 < bytes.len() {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        self.0 -= bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn convert_to_an_output_without_room_blames_the_output() {
    let directory = tempfile::tempdir().unwrap();
    for (source, format) in
        [("file-legacy", "legacy"), ("file-legacy", "legacy-zstd"), ("file-mapped-ram", "legacy")]
    {
        let from = Input::File(put(directory.path(), source, &vector(source)));
        let failed = convert(from, Output::Pipe(Box::new(Full(1000))), &target(format)).unwrap_err();

        assert!(!failed.is_image_at_fault(), "{source}, {format}: {failed}");
        assert!(failed.to_string().starts_with("standard output: write failed"), "{format}: {failed}");
    }
}

#[test]
fn convert_of_a_background_snapshot_without_bitmaps_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut shape = machine();
    shape.has_end = false;
    shape.between.clear();
    let source = directory.path().join("a");
    let writer = MappedWriter::create(&source, &shape, MappedOptions::default()).unwrap();
    // Pages at their places but no set bit, like QEMU's background snapshot.
    writer.file().write_at(writer.pages_offset(0), &[IoPart::Bytes(&[7; 4096])]).unwrap();
    writer.complete(&shape).unwrap();
    for form in ["mapped-ram", "legacy", "legacy-zstd"] {
        let refused = run(&source, &directory.path().join("b"), &target(form)).unwrap_err();

        assert!(matches!(refused, ImageError::NoBitmaps { .. }), "{form}: {refused}");
        assert!(refused.is_image_at_fault() && refused.to_string().contains("sterna repair"));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "{form}");
    }
}
