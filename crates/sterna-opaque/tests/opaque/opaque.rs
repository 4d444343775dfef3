//! Opaque machines: received into images, and sent from images.

mod memory;
mod stream;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::common::*;
use crate::support;
use crate::support::destination::HandMade;
use sterna::{
    Address, Capabilities, Compression, MigrationError, Outcome, Parameters, StartError, Vm,
    ZeroPageDetection,
};
use sterna_image::{Image, ImageError, MappedOptions};
use sterna_opaque::{ImagePlan, Receiving, SendOptions, receive, send};
use sterna_transport::TransportError;
use sterna_wire::extension::{KEEPALIVE_PING, PREPARE_PING};
use sterna_wire::main::Command;
use stream::{BLOCKS, Stream};
use tempfile::TempDir;

fn plan(directory: &TempDir) -> ImagePlan {
    ImagePlan { path: directory.path().join("image"), options: MappedOptions::default(), convert: None }
}

fn reception(directory: &TempDir, params: &Parameters, capabilities: Capabilities) -> Receiving {
    let at: Address = "tcp:127.0.0.1:0".parse().unwrap();
    receive(&at, plan(directory), params.clone(), capabilities, Arc::new(())).expect("listening")
}

fn sending(path: &Path, to: &Address, params: &Parameters, capabilities: Capabilities) -> sterna::Migration {
    let image = Image::open(path).expect("an image");
    send(image, to, &SendOptions::default(), params.clone(), capabilities, Arc::new(())).expect("started")
}

/// Asserts that there is no image and no staging file.
fn assert_absent(directory: &TempDir) {
    let left: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Receives a running guest into an image, and sends it from the image.
fn through_an_image(params: &Parameters, capabilities: Capabilities) {
    let directory = tempfile::tempdir().unwrap();
    let (source, target) = pair(&config());
    let receiving = reception(&directory, params, capabilities);
    let migration = start(&source, &receiving.address(), params, capabilities, Arc::new(()));
    let (outcome, stored) = (migration.wait(), receiving.wait());
    let stored = stored.unwrap_or_else(|error| panic!("{error}; the source: {outcome:?}"));
    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    assert_eq!(stored.path, directory.path().join("image"));
    assert!(stored.shape.has_end && stored.shape.has_eof);
    assert!(stored.shape.description.is_some());

    let incoming = listen(&target, params, capabilities);
    let migration = sending(&stored.path, &incoming.address(), params, capabilities);
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    assert_arrived(&outcome, &arrival, &target);
}

#[test]
fn main_channel_carries_a_guest_through_an_image() {
    through_an_image(&parameters(), Capabilities::default());
}

#[test]
fn multifd_carries_a_guest_through_an_image_with_any_number_of_channels() {
    for channels in [1, 2, 4, 16] {
        let (params, capabilities) = multifd(channels);
        through_an_image(&params, capabilities);
    }
}

#[test]
fn compression_carries_a_guest_through_an_image() {
    for compression in [Compression::Zlib, Compression::Zstd] {
        let (mut params, capabilities) = multifd(2);
        params.multifd_compression = compression;
        params.downtime_limit = std::time::Duration::from_secs(10);
        through_an_image(&params, capabilities);
    }
}

#[test]
fn zero_pages_in_every_form_go_through_an_image() {
    for detection in [ZeroPageDetection::None, ZeroPageDetection::Legacy, ZeroPageDetection::Multifd] {
        for on in [false, true] {
            let (mut params, mut capabilities) = multifd(2);
            params.zero_page_detection = detection;
            capabilities.multifd = on;
            through_an_image(&params, capabilities);
        }
    }
}

#[test]
fn no_return_path_carries_a_guest_into_an_image() {
    let (params, mut capabilities) = multifd(2);
    capabilities.return_path = false;
    through_an_image(&params, capabilities);
}

#[test]
fn image_goes_into_an_image_bit_for_bit() {
    let directory = tempfile::tempdir().unwrap();
    let again = tempfile::tempdir().unwrap();
    let (source, _target) = pair(&config());
    let (params, capabilities) = multifd(3);
    let receiving = reception(&directory, &params, capabilities);
    let migration = start(&source, &receiving.address(), &params, capabilities, Arc::new(()));
    assert!(matches!(migration.wait(), Outcome::Completed));
    let first = receiving.wait().unwrap();
    let receiving = reception(&again, &params, capabilities);
    let migration = sending(&first.path, &receiving.address(), &params, capabilities);

    let outcome = migration.wait();
    let second = receiving.wait().unwrap();

    assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
    // The configuration in the description is generated, in QEMU's form.
    let (mut one, mut other) = (first.shape.clone(), second.shape.clone());
    let described = [&mut one, &mut other].map(|shape| shape.description.take().expect("described"));
    let listed = described.map(|text| sterna_wire::vmdesc::section_lengths(&text));
    assert_eq!(listed[0].as_ref().unwrap(), listed[1].as_ref().unwrap());
    assert_eq!(one, other);
    let (first, second) = (Image::open(&first.path).unwrap(), Image::open(&second.path).unwrap());
    assert_eq!(pages(&first), pages(&second));
    assert_eq!(source.ram().total_pages() as usize, pages(&first).iter().map(Vec::len).sum::<usize>() / 4096);
}

/// Content of every block.
fn pages(image: &Image) -> Vec<Vec<u8>> {
    let mapped = image.mapped().expect("fixed places");
    let read = |(index, block): (usize, &sterna_image::MappedBlock)| {
        let mut bytes = vec![0; block.length_bytes as usize];
        mapped.read(index, 0, &mut bytes).unwrap();
        bytes
    };
    mapped.blocks().iter().enumerate().map(read).collect()
}

/// Receives `stream` from a source that sends it, and then waits (with a return path) or closes.
fn store(stream: &mut Stream) -> (TempDir, Result<sterna_opaque::Stored, MigrationError>, Vec<u8>) {
    let directory = tempfile::tempdir().unwrap();
    let mut params = parameters();
    params.limits.stall = std::time::Duration::from_secs(3);
    let receiving = reception(&directory, &params, Capabilities::default());
    let answers = stream.play(&receiving.address());
    let stored = receiving.wait();
    (directory, stored, answers.join().unwrap())
}

fn assert_stored(name: &str, stream: &mut Stream) {
    let (_directory, stored, answers) = store(stream);
    let stored = stored.unwrap_or_else(|error| panic!("{name}: {error}"));
    let image = Image::open(&stored.path).unwrap();
    let shape = image.shape();
    assert_eq!(shape.configuration.machine_type, "pc-i440fx-11.1");
    assert_eq!(shape.early, stream.early);
    assert_eq!(shape.setup, stream.setup, "{name}");
    assert_eq!(shape.between, stream.between, "{name}");
    assert_eq!(shape.devices, stream.devices);
    assert_eq!(shape.has_end, stream.has_end);
    assert_eq!(shape.description.is_some(), stream.described);
    assert_eq!(shape.ram.section_id, stream::RAM);
    let names: Vec<_> = shape.ram.blocks.iter().map(|b| (b.name.as_str(), b.length_bytes)).collect();
    assert_eq!(names, BLOCKS);
    assert!(pages(&image) == stream.ram, "{name}: RAM");
    if stream.return_path {
        assert!(answers.ends_with(&[0, 1, 0, 4, 0, 0, 0, 0]), "no SHUT 0: {answers:02x?}");
    }
}

#[test]
fn qemus_stream_in_every_form_is_stored_bit_for_bit() {
    for return_path in [true, false] {
        for change in stream::CHANGES {
            let mut stream = Stream::new(return_path);
            (change.1)(&mut stream);
            assert_stored(change.0, &mut stream);
        }
    }
}

#[test]
fn stream_cut_at_any_byte_leaves_no_image_and_says_so() {
    let whole = Stream::new(true);
    let bytes = whole.bytes();
    // All of the head and the tail, and some places between the pages.
    let places = (0..400).chain((400..bytes.len() - 900).step_by(3001)).chain(bytes.len() - 900..bytes.len());
    let directory = tempfile::tempdir().unwrap();
    let head = bytes.windows(5).position(|window| window == [8, 0, 1, 0, 0]).expect("OPEN_RETURN_PATH");
    let mut cuts = 0;
    for length in places {
        // A stream that ends before the end of its configuration may be any peer's. It is rejected.
        if length <= head {
            continue;
        }
        let receiving = reception(&directory, &parameters(), Capabilities::default());
        let answers = stream::play(&receiving.address(), bytes[..length].to_vec(), false);
        let error = receiving.wait().expect_err("a cut stream");
        assert_ne!(error.fault(), Some(sterna::Fault::Local), "{error}");
        answers.join().unwrap();
        drop(receiving);
        assert_absent(&directory);
        cuts += 1;
    }
    assert!(cuts > 1000, "{cuts}");
}

#[test]
fn sternas_question_is_answered_with_a_keepalive_before_and_behind_it() {
    let directory = tempfile::tempdir().unwrap();
    let receiving = reception(&directory, &parameters(), Capabilities::default());
    let mut stream = Stream::new(true);
    stream.is_sterna = true;
    let bytes = stream.bytes();
    let (mut asked, end) = (bytes.clone(), stream.end());
    asked.truncate(bytes.len() - end.len());
    for ping in [KEEPALIVE_PING, PREPARE_PING, KEEPALIVE_PING] {
        Command::Ping(ping).encode(&mut asked).unwrap();
    }
    let mut socket = TcpStream::connect(("127.0.0.1", support::port(&receiving.address()))).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut answers = Vec::new();
    let mut read_until = |socket: &mut TcpStream, wanted: &[u8]| {
        while !contains(&answers, wanted) {
            let mut buffer = [0; 512];
            let count = socket.read(&mut buffer).expect("an answer in time");
            assert!(count > 0, "{wanted:02x?} is not in {answers:02x?}");
            answers.extend_from_slice(&buffer[..count]);
        }
    };

    socket.write_all(&asked).unwrap();
    read_until(&mut socket, &[&[0, 2, 0, 4], &PREPARE_PING.to_be_bytes()[..]].concat());
    socket.write_all(&end).unwrap();
    read_until(&mut socket, &[0, 1, 0, 4, 0, 0, 0, 0]);
    drop(socket);

    let stored = receiving.wait().expect("stored");
    assert_eq!(Image::open(&stored.path).unwrap().shape().devices, stream.devices);
}

/// Receives a stream into a place where another file is created meanwhile. Returns the reason why there is no image.
fn into_a_taken_place(directory: &TempDir, stream: &mut Stream, plan: ImagePlan) -> MigrationError {
    let path = plan.path.clone();
    let at: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let receiving = receive(&at, plan, parameters(), Capabilities::default(), Arc::new(())).unwrap();
    let bytes = stream.bytes();
    let (first, rest) = bytes.split_at(bytes.len() / 2);
    let mut socket = TcpStream::connect(("127.0.0.1", support::port(&receiving.address()))).unwrap();
    socket.write_all(first).unwrap();
    support::eventually("the image is begun", || {
        std::fs::read_dir(directory.path()).unwrap().next().is_some()
    });
    std::fs::write(&path, "precious").unwrap();
    socket.write_all(rest).unwrap();
    if !stream.return_path {
        socket.shutdown(Shutdown::Write).unwrap();
    }
    let error = receiving.wait().expect_err("the place is taken");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    error
}

/// Asserts that another file is where the image belongs.
#[track_caller]
fn assert_taken(error: &MigrationError) {
    let is_taken = matches!(support::cause(error), Some(TransportError::FileExists { .. }))
        || matches!(support::cause(error), Some(ImageError::Exists { .. }));
    assert!(is_taken, "{error:?}");
}

#[test]
fn only_copy_that_cannot_take_its_place_is_kept_and_the_real_reason_told() {
    use sterna_image::convert::ConvertOptions;
    let target = sterna_image::Format::Legacy;
    for convert in [None, Some(ConvertOptions { target: Some(target), ..ConvertOptions::default() })] {
        let directory = tempfile::tempdir().unwrap();
        let mut stream = Stream::new(false);
        stream.ram = stream.final_ram();

        let plan = ImagePlan { convert, ..plan(&directory) };
        let error = into_a_taken_place(&directory, &mut stream, plan);

        let MigrationError::Kept { place, why } = &error else { panic!("{error}") };
        assert_taken(why);
        let image = Image::open(place).expect("the whole machine");
        assert_eq!(image.shape().devices, stream.devices);
        assert!(pages(&image) == stream.ram);
    }
}

#[test]
fn image_that_cannot_take_its_place_is_dropped_where_the_source_hears_of_it() {
    let directory = tempfile::tempdir().unwrap();

    let error = into_a_taken_place(&directory, &mut Stream::new(true), plan(&directory));

    assert!(!matches!(error, MigrationError::Kept { .. }), "{error}");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "only the file that was there");
}

#[test]
fn stream_that_lies_is_refused_by_name() {
    type Lie = (&'static str, fn(&mut Stream));
    let lies: [Lie; 6] = [
        ("occurs twice", |s| s.blocks = vec![("m0", 16 << 12), ("m0", 4 << 12)]),
        ("of the total", |s| s.total = Some(17 << 12)),
        ("larger than", |s| s.blocks = vec![("m0", 1 << 45)]),
        ("not a multiple", |s| s.blocks = vec![("m0", 4097)]),
        ("is beyond block", |s| s.pages_word = Some(99 << 12)),
        ("multifd", |s| s.flushes = true),
    ];
    for (word, lie) in lies {
        let mut stream = Stream::new(true);
        lie(&mut stream);
        let (directory, stored, answers) = store(&mut stream);
        let error = stored.expect_err(word).to_string();
        assert!(error.contains(word), "{word}: {error}");
        // SHUT 1: the source's guest continues to run.
        assert!(answers.ends_with(&[0, 1, 0, 4, 0, 0, 0, 1]), "{word}: {answers:02x?}");
        assert_absent(&directory);
    }
}

#[test]
fn source_whose_configuration_does_not_fit_is_turned_away_and_the_next_one_is_received() {
    let directory = tempfile::tempdir().unwrap();
    let log = Arc::new(Log::default());
    let at: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let receiving =
        receive(&at, plan(&directory), parameters(), Capabilities::default(), Arc::clone(&log) as _).unwrap();
    let mut unfit = Stream::new(true);
    unfit.capabilities = vec!["x-ignore-shared".to_owned()];
    assert_eq!(unfit.play(&receiving.address()).join().unwrap(), b"", "it is closed");
    support::eventually("the reason", || support::has_warning(&log.events(), &["x-ignore-shared"]));
    let answers = Stream::new(true).play(&receiving.address());
    receiving.wait().expect("received");
    answers.join().unwrap();
}

#[test]
fn existing_image_is_kept_unless_it_may_be_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, "precious").unwrap();
    let receiving = reception(&directory, &parameters(), Capabilities::default());
    let answers = Stream::new(true).play(&receiving.address());

    let error = receiving.wait().expect_err("there is a file");

    assert_taken(&error);
    assert!(answers.join().unwrap().ends_with(&[0, 1, 0, 4, 0, 0, 0, 1]));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let mut plan = plan(&directory);
    plan.options.file.replace = true;
    let at: Address = "tcp:127.0.0.1:0".parse().unwrap();
    let receiving = receive(&at, plan, parameters(), Capabilities::default(), Arc::new(())).unwrap();
    let answers = Stream::new(true).play(&receiving.address());
    receiving.wait().expect("replaced");
    answers.join().unwrap();
    Image::open(&path).expect("an image");
}

#[test]
fn switchover_is_acknowledged_as_the_machine_type_wants_it() {
    for (machine, acks) in [("pc-i440fx-11.1", 0), ("pc-i440fx-11.0", 1), ("pc-q35-9.2", 1), ("none", 0)] {
        let directory = tempfile::tempdir().unwrap();
        let capabilities = Capabilities { switchover_ack: true, ..Capabilities::default() };
        let receiving = reception(&directory, &parameters(), capabilities);
        let mut stream = Stream::new(true);
        stream.machine = machine;
        let answers = stream.play(&receiving.address());
        receiving.wait().expect(machine);
        let answers = answers.join().unwrap();
        assert_eq!(answers.windows(4).filter(|bytes| *bytes == [0, 7, 0, 0]).count(), acks, "{machine}");
    }
}

#[test]
fn cancelled_reception_leaves_no_image_and_frees_the_address() {
    let directory = tempfile::tempdir().unwrap();
    let receiving = reception(&directory, &parameters(), Capabilities::default());
    let bytes = Stream::new(true).bytes();
    let answers = stream::play(&receiving.address(), bytes[..bytes.len() / 2].to_vec(), true);
    support::eventually("pages come", || receiving.statistics().normal_pages > 0);

    receiving.cancel().expect("early enough");

    assert!(matches!(receiving.wait(), Err(MigrationError::Cancelled)));
    answers.join().unwrap();
    assert_absent(&directory);
}

#[test]
fn image_is_sent_to_a_qemu_byte_for_byte() {
    for change in stream::CHANGES {
        let mut stream = Stream::new(true);
        (change.1)(&mut stream);
        let (_directory, stored, _) = store(&mut stream);
        let qemu = HandMade::like_qemu().without_multifd().of_other_devices();
        let path = stored.expect(change.0).path;
        let migration = sending(&path, &qemu.address(), &parameters(), Capabilities::default());
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Completed), "{}: {outcome:?}", change.0);
        let sent = qemu.main();
        let setup = [("setup", &stream.setup), ("early", &stream.early)];
        for (what, bytes) in
            setup.into_iter().chain([("between", &stream.between), ("devices", &stream.devices)])
        {
            assert!(contains(&sent, bytes), "{}: {what} is missing", change.0);
        }
        let mut prepare = stream.devices.clone();
        Command::Ping(sterna_wire::extension::PREPARE_PING).encode(&mut prepare).unwrap();
        assert!(contains(&sent, &prepare), "{}: prepare stands behind the devices", change.0);
        let mut end = vec![0];
        let text = Image::open(&path).unwrap().shape().for_form(sterna_image::Form::Legacy).description;
        let text = text.map(|text| String::from_utf8(text).unwrap()).unwrap_or_default();
        sterna_wire::vmdesc::encode(&text, &mut end).unwrap();
        assert!(sent.ends_with(&end), "{}", change.0);
    }
}

#[test]
fn stream_is_stored_in_any_form_before_the_source_is_told() {
    use sterna_image::convert::ConvertOptions;
    let mut stream = Stream::new(true);
    for target in [sterna_image::Format::Legacy, sterna_image::Format::LegacyZstd] {
        let directory = tempfile::tempdir().unwrap();
        let mut plan = plan(&directory);
        plan.convert = Some(ConvertOptions { target: Some(target), ..ConvertOptions::default() });
        let at: Address = "tcp:127.0.0.1:0".parse().unwrap();
        let receiving = receive(&at, plan, parameters(), Capabilities::default(), Arc::new(())).unwrap();
        let answers = stream.play(&receiving.address());
        let stored = receiving.wait().expect("stored");
        assert!(answers.join().unwrap().ends_with(&[0, 1, 0, 4, 0, 0, 0, 0]));
        let image = Image::open(&stored.path).unwrap();
        assert!(image.mapped().is_none());
        assert_eq!(image.shape().devices, stream.devices);
        // Sent without fixed places, through a spool file.
        let again = tempfile::tempdir().unwrap();
        let receiving = reception(&again, &parameters(), Capabilities::default());
        let migration = sending(&stored.path, &receiving.address(), &parameters(), Capabilities::default());
        let outcome = migration.wait();
        assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
        let second = receiving.wait().expect("stored again");
        assert_eq!(pages(&Image::open(&second.path).unwrap()), stream.ram);
        let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }
}

fn contains(all: &[u8], part: &[u8]) -> bool {
    part.is_empty() || all.windows(part.len()).any(|window| window == part)
}

#[test]
fn image_cut_short_is_not_sent() {
    let (directory, stored, _) = store(&mut Stream::new(true));
    let path = stored.unwrap().path;
    let whole = std::fs::metadata(&path).unwrap().len();
    let image = Image::open(&path).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(whole / 2).unwrap();
    let target = tempfile::tempdir().unwrap();
    let receiving = reception(&target, &parameters(), Capabilities::default());

    // Without a check before sending, because the image can be cut at any time.
    let options = SendOptions { force_damaged: true, ..SendOptions::default() };
    let migration =
        send(image, &receiving.address(), &options, parameters(), Capabilities::default(), Arc::new(()));

    let outcome = migration.unwrap().wait();
    assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
    receiving.wait().expect_err("no image of half an image");
    assert_absent(&target);
    drop(directory);
}

#[test]
fn damaged_image_is_sent_only_if_that_is_forced() {
    let mut stream = Stream::new(true);
    stream.has_end = false;
    stream.between.clear();
    let (_directory, stored, _) = store(&mut stream);
    let path = stored.unwrap().path;
    let to: Address = "tcp:127.0.0.1:9".parse().unwrap();
    // As after a repair that wrote only some bitmaps: RAM has no END, and a page has content although its bit is
    // clear.
    let bitmap = Image::open(&path).unwrap().mapped().unwrap().blocks()[0].bitmap_offset;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut bits = [0];
    file.read_exact_at(&mut bits, bitmap).unwrap();
    assert_eq!(bits[0] & 1, 1);
    file.write_all_at(&[bits[0] & !1], bitmap).unwrap();

    let image = Image::open(&path).unwrap();
    assert!(!image.lacks_bitmaps());
    let options = SendOptions::default();
    let refused = send(image, &to, &options, parameters(), Capabilities::default(), Arc::new(()));

    let Err(StartError::DamagedImage(damage)) = refused else { panic!("{:?}", refused.err()) };
    let Some(ImageError::Damaged { first, .. }) = damage.downcast_ref() else { panic!("{damage}") };
    // The image's finding is a text of the verifier.
    assert!(first.contains("clear bits"), "{first}");
    let target = tempfile::tempdir().unwrap();
    let receiving = reception(&target, &parameters(), Capabilities::default());
    let image = Image::open(&path).unwrap();
    let options = SendOptions { force_damaged: true, ..options };
    let forced =
        send(image, &receiving.address(), &options, parameters(), Capabilities::default(), Arc::new(()));
    assert!(matches!(forced.unwrap().wait(), Outcome::Completed));
    receiving.wait().expect("stored");
}

#[test]
fn old_machine_type_is_not_sent_over_multifd() {
    let mut stream = Stream::new(true);
    stream.machine = "pc-i440fx-8.0";
    let (_directory, stored, _) = store(&mut stream);
    let image = Image::open(&stored.unwrap().path).unwrap();
    let (params, capabilities) = multifd(2);
    let to: Address = "tcp:127.0.0.1:9".parse().unwrap();

    let refused = send(image, &to, &SendOptions::default(), params, capabilities, Arc::new(()));

    let Err(StartError::Settings(sterna::SettingsError::FlushesSilently { machine_type })) = refused else {
        panic!("{:?}", refused.err())
    };
    assert_eq!(machine_type, "pc-i440fx-8.0");
}
