//! Machines of every shape: with optional parts that QEMU may add or omit.

use std::path::Path;

use crate::common::{Ram, content, give, legacy, machine, open, section};
use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::{Access, Form, Image, LegacyWriter, MappedOptions, MappedWriter, PageVisitor, Shape};
use sterna_wire::main::{encode_footer, encode_section_part};
use sterna_wire::ram::RamRecordWriter;
use sterna_wire::{PAGE_SIZE, xbzrle};

/// Writes the shape as mapped-ram and opens the file.
fn mapped(directory: &Path, shape: &Shape) -> Image {
    let path = directory.join("mapped");
    let writer = MappedWriter::create(&path, shape, MappedOptions::default()).unwrap();
    let mut lane = writer.lane();
    give(shape, &mut lane).unwrap();
    lane.drain().unwrap();
    writer.complete(shape).unwrap();
    let image = Image::open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    image
}

/// Checks that both forms of an image preserve the shape.
fn check(shape: &Shape) {
    let directory = tempfile::tempdir().unwrap();
    let bytes = legacy(shape);
    let image = open(&bytes).unwrap();
    assert!(*image.shape() == shape.for_form(Form::Legacy), "{:?}", image.shape());
    assert_eq!((image.stream_end(), image.trailing_bytes()), (bytes.len() as u64, 0));
    let again = mapped(directory.path(), shape);
    assert!(*again.shape() == shape.for_form(Form::Mapped), "{:?}", again.shape());
    assert!(Ram::read(&image).unwrap() == Ram::read(&again).unwrap());
}

#[test]
fn image_with_everything_comes_back() {
    check(&machine());
}

#[test]
fn image_without_end_command_description_or_configuration_comes_back() {
    let mut shape = machine();
    shape.has_end = false;
    shape.between.clear();
    check(&shape);
    shape.description = None;
    check(&shape);
    shape.early.clear();
    check(&shape);
    shape.devices.clear();
    check(&shape);
    // mapped-ram needs its capability, and therefore a configuration.
    shape.has_configuration = false;
    shape.configuration.machine_type.clear();
    assert!(*open(&legacy(&shape)).unwrap().shape() == shape);
}

#[test]
fn image_with_uuid_and_capabilities_comes_back() {
    let mut shape = machine();
    shape.configuration.uuid = Some([7; 16]);
    check(&shape);
}

#[test]
fn image_without_footers_comes_back() {
    let mut shape = machine();
    shape.ram.footers = false;
    shape.early.clear();
    shape.devices = b"\x04\0\0\0\x09\x03cpu\0\0\0\0\0\0\0\x01registers".to_vec();
    check(&shape);
}

#[test]
fn image_with_shared_memory_left_out_comes_back() {
    let mut shape = machine();
    shape.configuration.capabilities.push("x-ignore-shared".to_owned());
    for block in &mut shape.ram.blocks {
        block.address = Some(0xfffc_0000);
    }
    shape.ram.blocks[0].is_skipped = true;
    check(&shape);

    // A file can be converted both ways. A pipe cannot, because the skipped blocks are known only at its end.
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (directory.path().join("a"), directory.path().join("b"));
    std::fs::write(&from, legacy(&shape)).unwrap();
    convert(Input::File(from), Output::File(to.clone()), &ConvertOptions::default()).unwrap();
    assert!(*Image::open(&to).unwrap().shape() == shape.for_form(Form::Mapped));
    let pipe = Input::Pipe(Box::new(std::io::Cursor::new(legacy(&shape))));
    let refused = convert(pipe, Output::File(directory.path().join("c")), &ConvertOptions::default());
    assert!(refused.unwrap_err().to_string().contains("from a file"));
}

#[test]
fn image_with_host_page_sizes_comes_back() {
    for with_address in [false, true] {
        let mut shape = machine();
        if with_address {
            shape.configuration.capabilities.push("x-ignore-shared".to_owned());
        }
        for (index, block) in shape.ram.blocks.iter_mut().enumerate() {
            block.address = with_address.then_some(index as u64 * 0x1000_0000);
        }
        for (first, second) in [(None, Some(2 << 20)), (Some(2 << 20), None), (Some(1 << 30), Some(8192))] {
            shape.ram.blocks[0].host_page_bytes = first;
            shape.ram.blocks[1].host_page_bytes = second;

            assert!(
                *open(&legacy(&shape)).unwrap().shape() == shape,
                "{first:?}, {second:?}, {with_address}"
            );
        }
    }
}

#[test]
fn section_before_ram_that_holds_its_own_footer_is_told_by_the_description() {
    // The body contains a valid footer and a valid section of RAM. Only its length separates them.
    let body =
        [&b"body "[..], b"\x7e\0\0\0\x07", b"\x01\0\0\0\x05\x03ram\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\x10\x04"]
            .concat();
    let mut shape = machine();
    shape.early = section(7, "0000:00:02.0/early", &body);
    let device = |name: &str, size: usize| {
        format!(
            r#"{{"name": "{name}", "instance_id": 0, "version": 1, "fields": [{{"name": "a", "size": {size}}}]}}"#
        )
    };
    let devices = [device("0000:00:02.0/early", body.len()), device("cpu", 3)].join(", ");
    shape.description = Some(format!(r#"{{"page_size": 4096, "devices": [{devices}]}}"#).into_bytes());
    check(&shape);

    // A length that does not lead to a footer is ignored.
    shape.early = machine().early;
    check(&shape);
}

#[test]
fn other_live_sections_between_rams_are_kept() {
    // Some sections start before RAM, others after RAM's START.
    let mut shape = machine();
    let mut live = vec![1];
    live.extend_from_slice(&section(20, "dirty-bitmap", b"start \x7e\0\0\0\x14 here")[1..]);
    encode_section_part(20, false, &mut live);
    live.extend_from_slice(b"more \x7e");
    encode_footer(20, &mut live);
    encode_section_part(20, true, &mut live);
    live.extend_from_slice(b"last");
    encode_footer(20, &mut live);
    shape.between = [live, vec![8, 0, 11, 0, 0]].concat();
    check(&shape);
}

#[test]
fn full_sections_beside_ram_are_told_from_the_devices_with_and_without_an_end() {
    for has_end in [true, false] {
        for (setup, between) in [
            (section(21, "early", b"loaded before pages"), vec![8, 0, 11, 0, 0]),
            (section(21, "early", b"loaded before pages"), Vec::new()),
            (Vec::new(), section(22, "late", b"loaded after some pages")),
        ] {
            let mut shape = machine();
            (shape.setup, shape.between, shape.has_end) = (setup, between, has_end);
            check(&shape);
        }
    }
}

#[test]
fn junk_behind_the_stream_is_told_and_left_out() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = legacy(&machine());
    let with_junk = [&bytes[..], &[0x5a; 5000]].concat();

    let image = open(&with_junk).unwrap();

    assert!(*image.shape() == machine());
    assert_eq!((image.stream_end(), image.trailing_bytes()), (bytes.len() as u64, 5000));
    let (from, to) = (directory.path().join("a"), directory.path().join("b"));
    std::fs::write(&from, &with_junk).unwrap();
    convert(Input::File(from), Output::File(to.clone()), &ConvertOptions::default()).unwrap();
    assert_eq!(Image::open(&to).unwrap().trailing_bytes(), 0);
}

/// A stream of the machine with more records after its own, like a live save.
fn live(records: impl FnOnce(&mut RamRecordWriter, &mut Vec<u8>)) -> Vec<u8> {
    let shape = machine();
    let mut bytes = Vec::new();
    let whole = legacy(&shape);
    // RAM's PART ends before the command.
    let mut end = Vec::new();
    RamRecordWriter::eos(&mut end);
    encode_footer(5, &mut end);
    let mark = [&end[..], &shape.between].concat();
    let at = whole.windows(mark.len()).position(|window| window == mark).unwrap();
    bytes.extend_from_slice(&whole[..at + end.len()]);
    encode_section_part(5, false, &mut bytes);
    records(&mut RamRecordWriter::new(), &mut bytes);
    bytes.extend_from_slice(&end);
    bytes.extend_from_slice(&whole[at + end.len()..]);
    bytes
}

#[test]
fn page_that_comes_again_is_as_it_came_last() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = live(|records, out| {
        for fill in [1u8, 2, 3] {
            records.page_header(0, "m0", 4096, out).unwrap();
            out.extend_from_slice(&[fill; PAGE_SIZE]);
        }
        records.zero(0, "m0", 0, out).unwrap();
        records.page_header(0, "m0", 8192, out).unwrap();
        out.extend_from_slice(&[9; PAGE_SIZE]);
        records.zero(0, "m0", 8192, out).unwrap();
        records.page_header(0, "m0", 8192, out).unwrap();
        out.extend_from_slice(&[4; PAGE_SIZE]);
    });
    let expected = [&[0; PAGE_SIZE][..], &[3; PAGE_SIZE], &[4; PAGE_SIZE]].concat();

    let image = open(&bytes).unwrap();
    let spool = image.spool(directory.path()).unwrap();
    let (from, to) = (directory.path().join("a"), directory.path().join("b"));
    std::fs::write(&from, &bytes).unwrap();
    convert(Input::File(from), Output::File(to.clone()), &ConvertOptions::default()).unwrap();
    let converted = Image::open(&to).unwrap();

    assert!(Ram::read(&image).unwrap().0[0] == expected);
    assert!(Ram::read(&spool).unwrap().0[0] == expected);
    assert!(Ram::read(&converted).unwrap().0[0] == expected);
    let mapped = converted.mapped().unwrap();
    let block = &mapped.blocks()[0];
    assert!(!block.bitmap.get(0) && block.bitmap.get(1) && block.bitmap.get(2));
    // No stale data under the clear bit.
    let mut under = [0xaa; PAGE_SIZE];
    assert_eq!(mapped.source().read_at(block.pages_offset, &mut under).unwrap(), PAGE_SIZE);
    assert_eq!(under, [0; PAGE_SIZE]);
    assert!(std::fs::read_dir(directory.path()).unwrap().count() == 2, "the spool has no name");
}

#[test]
fn page_that_comes_as_a_difference_is_applied_to_what_came_before() {
    let directory = tempfile::tempdir().unwrap();
    let old = content(0, 2);
    let mut once = old;
    once[100..108].fill(0xee);
    let mut twice = once;
    twice[4000] ^= 1;
    let mut few = [0; PAGE_SIZE];
    few[17..20].fill(5);
    let bytes = live(|records, out| {
        for (from, to) in [(&old, &once), (&once, &twice)] {
            let mut delta = Vec::new();
            assert!(xbzrle::encode(from, to, PAGE_SIZE, &mut delta));
            records.xbzrle(0, "m0", 8192, &delta, out).unwrap();
        }
        // A delta of a zero page, too.
        let mut delta = Vec::new();
        assert!(xbzrle::encode(&[0; PAGE_SIZE], &few, PAGE_SIZE, &mut delta));
        records.xbzrle(0, "m0", 4096, &delta, out).unwrap();
    });

    let image = open(&bytes).unwrap();
    assert!(image.has_deltas());
    assert!(image.visit_pages(&mut Ram::of(image.shape())).unwrap_err().to_string().contains("spool"));
    let spool = image.spool(directory.path()).unwrap();
    let (from, to) = (directory.path().join("a"), directory.path().join("b"));
    std::fs::write(&from, &bytes).unwrap();
    convert(Input::File(from), Output::File(to.clone()), &ConvertOptions::default()).unwrap();
    for image in [spool, Image::open(&to).unwrap()] {
        let ram = Ram::read(&image).unwrap();
        assert!(ram.0[0][8192..] == twice);
        assert!(ram.0[0][4096..8192] == few);
    }
}

#[test]
fn mapped_pages_read_at_random_are_those_of_the_visit() {
    let directory = tempfile::tempdir().unwrap();
    let image = mapped(directory.path(), &machine());
    let pages = image.mapped().unwrap();
    for (block, count) in [(0, 3), (1, 2)] {
        for first in 0..count {
            for length in 1..=count - first {
                let mut read = vec![0xaa; length as usize * PAGE_SIZE];
                pages.read(block, first, &mut read).unwrap();
                let expected: Vec<u8> =
                    (first..first + length).flat_map(|page| content(block, page)).collect();
                assert!(read == expected, "block {block}, {length} pages from {first}");
            }
        }
    }
}

#[test]
fn lane_that_writes_pages_again_and_again_leaves_the_last() {
    // Several hundred thousand writes in a seeded random order, compared with a plain array.
    let mut rng = sterna_testing::random("lane_that_writes_pages_again_and_again");
    let mut random = |below: u64| rng.u64(..below);
    let mut shape = machine();
    let pages = 2000;
    shape.ram.blocks.truncate(1);
    shape.ram.blocks[0].length_bytes = pages * PAGE_SIZE as u64;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    let writer = MappedWriter::create(&path, &shape, MappedOptions::default()).unwrap();
    let mut lane = writer.lane();
    let mut model = vec![0u8; pages as usize];
    for _ in 0..20_000 {
        let first = random(pages);
        let count = 1 + random(40).min(pages - first - 1);
        let fill = random(256) as u8;
        model[first as usize..(first + count) as usize].fill(fill);
        if fill == 0 {
            lane.zero(0, first, count).unwrap();
        } else {
            lane.pages(0, first, &vec![fill; count as usize * PAGE_SIZE]).unwrap();
        }
    }
    lane.drain().unwrap();
    writer.complete(&shape).unwrap();

    let ram = Ram::read(&Image::open(&path).unwrap()).unwrap();

    for (page, fill) in model.iter().enumerate() {
        assert!(ram.0[0][page * PAGE_SIZE..][..PAGE_SIZE].iter().all(|byte| byte == fill), "page {page}");
    }
}

#[test]
fn index_of_a_stream_leads_to_the_last_record_of_each_page() {
    let shape = machine();
    let mut writer = LegacyWriter::new(Vec::new(), "memory", &shape).unwrap();
    // A zero page gets content, a page with content becomes zero, another page changes, and one page is missing.
    let (old, new) = ([1; PAGE_SIZE], [2; PAGE_SIZE]);
    writer.zero(0, 0, 1).unwrap();
    writer.pages(0, 1, &old).unwrap();
    writer.pages(0, 2, &old).unwrap();
    writer.zero(1, 0, 1).unwrap();
    writer.pages(0, 0, &new).unwrap();
    writer.zero(0, 1, 1).unwrap();
    writer.pages(0, 2, &new).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("stream");
    let bytes = writer.finish(&shape).unwrap();
    std::fs::write(&path, &bytes).unwrap();

    let image = Image::open_indexed(&path, &Access::default()).unwrap();

    let places = image.places().unwrap();
    let offset = |block, page| places.offset(block, page).map(|at| &bytes[at as usize..][..PAGE_SIZE]);
    assert_eq!(offset(0, 0), Some(&new[..]));
    assert_eq!(offset(0, 1), None);
    assert_eq!(offset(0, 2), Some(&new[..]));
    assert_eq!((offset(1, 0), offset(1, 1)), (None, None));
    let held: Vec<bool> = (0..3).map(|page| places.held(0).get(page)).collect();
    assert_eq!((held, places.held(1).count()), (vec![true, false, true], 0));
    assert!(Image::open(&path).unwrap().places().is_none(), "nobody asked for it");
}
