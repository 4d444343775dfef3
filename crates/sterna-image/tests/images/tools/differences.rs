//! Finds the differences between two images.

use sterna_image::tools::diff::{DiffOptions, Difference, diff};
use sterna_image::{ImageError, Shape};

use super::sample::{PAGE, Plan, describe, open};
use crate::common::{legacy, machine, section, vector};

fn compare(a: Vec<u8>, b: Vec<u8>) -> Difference {
    let directory = tempfile::tempdir().unwrap();
    diff(&open(a), &open(b), directory.path(), &DiffOptions { threads: 2, ranges: 2 }).unwrap()
}

#[test]
fn diff_of_an_image_with_itself_is_nothing() {
    let bytes = Plan::default().build().bytes;

    let difference = compare(bytes.clone(), bytes);

    assert!(difference.is_same(), "{difference:#?}");
    assert_eq!(difference.compared_pages, 150 + 32 + 64 + 1);
}

#[test]
fn diff_ignores_what_does_not_count() {
    let sample = Plan::default().build();
    let free = sample.page(0, false);
    let stale = sample.edited(|bytes, s| bytes[s.page_range(0, free)].fill(9));
    let zeros = sample.edited(|bytes, s| bytes[s.blocks[0].bitmap + free / 8] |= 1 << (free % 8));
    let container =
        [b"LibvirtQemudSave\x02\0\0\0\x04\0\0\0".to_vec(), vec![0; 4], vec![6, 0, 0, 0], vec![0; 60]];
    let front = [container.concat(), b"<a/\0".to_vec()].concat();
    let moved = Plan { front, ..Plan::default() }.build().bytes;

    for other in [stale, zeros, moved] {
        let difference = compare(sample.bytes.clone(), other);
        assert!(difference.is_same(), "{difference:#?}");
    }
}

#[test]
fn diff_pages_are_counted_and_located() {
    let sample = Plan::default().build();
    let held: Vec<usize> = (0..8).collect();
    let b = sample.edited(|bytes, s| {
        for page in [0, 1, 2, 5, 7] {
            bytes[s.page_range(0, held[page]).end - 1] ^= 1;
        }
    });

    let difference = compare(sample.bytes.clone(), b);

    assert_eq!(difference.blocks.len(), 1);
    let block = &difference.blocks[0];
    assert_eq!((block.name.as_str(), block.pages, block.range_count), ("pc.ram", 5, 3));
    assert_eq!(block.ranges, [(0, 3), (5, 1)]);
    assert!(difference.sections.is_empty() && !difference.is_same());
}

#[test]
fn diff_devices_names_fields() {
    let plan = Plan::default();
    let mut other = plan.clone();
    other.devices[0].1[0] = 9;
    other.devices[0].1[23] = 1;

    let difference = compare(plan.build().bytes, other.build().bytes);

    assert_eq!(difference.sections.len(), 1);
    let section = &difference.sections[0];
    assert_eq!((section.name.as_str(), section.differing_bytes), ("timer", 2));
    let fields: Vec<_> =
        section.fields.iter().map(|f| (f.what.as_str(), f.a.as_str(), f.b.as_str())).collect();
    assert_eq!(fields[0], ("first", "0x07", "0x09"));
    assert_eq!((fields.len(), fields[1].0), (2, "rest"));
}

#[test]
fn diff_blocks_and_devices_that_only_one_has_are_named() {
    let plan = Plan::default();
    let mut other = Plan { machine: "pc-q35-11.1", ..plan.clone() };
    other.blocks[3].0 = "two";
    other.blocks[1].1 = 16;
    other.devices[1].0 = "else";
    other.description = Some(describe(&other.devices, &["mapped-ram"]));

    let difference = compare(plan.build().bytes, other.build().bytes);

    let names: Vec<_> =
        difference.blocks.iter().map(|block| (block.name.as_str(), block.length_bytes)).collect();
    let page = PAGE as u64;
    assert_eq!(
        names,
        [
            ("/rom@etc/acpi/tables", [Some(32 * page), Some(16 * page)]),
            ("one", [Some(page), None]),
            ("two", [None, Some(page)])
        ]
    );
    let sections: Vec<_> = difference.sections.iter().map(|section| section.name.as_str()).collect();
    assert_eq!(sections, ["trap", "else"]);
    assert!(difference.description);
    assert!(
        difference.configuration.iter().any(|pair| pair.what == "machine type" && pair.b == "pc-q35-11.1")
    );
}

#[test]
fn diff_real_images_of_one_guest_in_two_forms_finds_equal_memory() {
    let difference = compare(vector("file-mapped-ram"), vector("file-legacy"));

    assert!(difference.blocks.is_empty(), "{:#?}", difference.blocks);
    assert!(difference.configuration.is_empty() && !difference.description, "{difference:#?}");
    assert_eq!(difference.kinds, ["mapped-ram", "legacy"]);
    // The second save was taken later, so clocks differ.
    let clocks = ["timer", "apic", "hpet", "i8254", "mc146818rtc", "cpu", "acpi"];
    for section in &difference.sections {
        assert!(clocks.iter().any(|clock| section.name.contains(clock)), "{section:#?}");
        assert!(!section.fields.is_empty());
    }
}

#[test]
fn diff_of_each_part_of_the_stream_that_differs_is_not_the_same() {
    let shape = machine();
    let shared = {
        let mut shape = shape.clone();
        shape.configuration.capabilities.push("x-ignore-shared".to_owned());
        shape.ram.blocks.iter_mut().for_each(|block| block.address = Some(0));
        shape.ram.blocks[0].is_skipped = true;
        shape
    };
    let longer = |at: usize| {
        let mut shape = shared.clone();
        shape.ram.blocks[at].length_bytes += 4096;
        shape
    };
    let elsewhere = {
        let mut shape = shared.clone();
        shape.ram.blocks[0].address = Some(1 << 32);
        shape
    };
    let command = Shape { between: vec![8, 0, 4, 0, 0], ..shape.clone() };
    let early = Shape { early: section(7, "0000:00:02.0/early", b"another body"), ..shape.clone() };
    // Without footers, sections cannot be separated.
    let blind = |early: &[u8]| {
        let mut shape = Shape { early: early.to_vec(), ..shape.clone() };
        shape.ram.footers = false;
        shape
    };
    let commands = (blind(b"\x08\0\x01\0\0"), blind(b"\x08\0\x02\0\0"));
    for (what, a, b) in [
        ("between", &shape, &command),
        ("early", &shape, &early),
        ("early, blind", &commands.0, &commands.1),
        ("length of a skipped block", &shared, &longer(0)),
        ("address", &shared, &elsewhere),
    ] {
        assert!(compare(legacy(a), legacy(a)).is_same(), "{what}");
        assert!(!compare(legacy(a), legacy(b)).is_same(), "{what}");
    }
}

/// A section of type START (1), PART (2) or END (3) of device `name`.
fn live(kind: u8, id: u32, name: &str, body: &[u8]) -> Vec<u8> {
    let mut out = section(id, name, body);
    out[0] = kind;
    if kind != 1 {
        out.drain(5..14 + name.len());
    }
    out
}

/// A machine with `bitmaps` live sections, each in `parts` PARTs.
fn with_bitmaps(bitmaps: u32, parts: usize, content: u8) -> Shape {
    let mut shape = machine();
    let ids = 100..100 + bitmaps;
    shape.setup = ids.clone().flat_map(|id| live(1, id, &format!("bitmap {id}"), b"a name")).collect();
    let part = |id: u32| {
        let all = [content; 24];
        all.chunks(24 / parts).flat_map(|some| live(2, id, "x", some)).collect::<Vec<_>>()
    };
    shape.between = [ids.clone().flat_map(part).collect::<Vec<_>>(), shape.between].concat();
    shape.devices = [ids.flat_map(|id| live(3, id, "x", b"")).collect::<Vec<_>>(), shape.devices].concat();
    shape
}

#[test]
fn diff_of_what_is_sent_beside_ram_in_more_parts_is_nothing() {
    let [three, four] = [3, 4].map(|parts| legacy(&with_bitmaps(1, parts, 7)));

    let same = compare(three.clone(), four);
    let other = compare(three.clone(), legacy(&with_bitmaps(1, 4, 8)));
    let none = compare(three, legacy(&machine()));

    assert!(same.is_same(), "{same:#?}");
    for difference in [other, none] {
        let what: Vec<_> = difference.configuration.iter().map(|pair| pair.what.as_str()).collect();
        assert!(what.contains(&"bitmap 100 instance 0 (next to RAM)"), "{what:?}");
    }
}

#[test]
fn diff_of_the_same_devices_in_another_order_is_told() {
    let one = machine();
    let (first, second) = (section(9, "cpu", b"registers"), section(10, "apic", &[0; 40]));
    let [a, b] = [[&first[..], &second], [&second, &first]].map(|devices| {
        let devices = devices.concat();
        legacy(&Shape { devices, ..one.clone() })
    });

    let difference = compare(a, b);

    let what: Vec<_> = difference.configuration.iter().map(|pair| pair.what.as_str()).collect();
    assert_eq!(what, ["order of devices"]);
}

/// Takes little time. A search through all sections for each part would make it slow.
#[test]
fn diff_of_many_sections_beside_ram_finds_the_one_that_differs() {
    let many = with_bitmaps(20_000, 4, 7);
    let mut other = many.clone();
    // The last part of the last bitmap.
    let at = other.between.windows(6).rposition(|bytes| bytes == [7; 6]).unwrap();
    other.between[at] = 8;

    let difference = compare(legacy(&many), legacy(&other));

    let what: Vec<_> = difference.configuration.iter().map(|pair| pair.what.as_str()).collect();
    assert_eq!(what, ["bitmap 20099 instance 0 (next to RAM)"]);
}

#[test]
fn diff_of_a_background_snapshot_without_bitmaps_is_refused() {
    let plan = Plan { has_end: false, ..Plan::default() };
    let (bare, mended) = (Plan { has_bitmaps: false, ..plan.clone() }.build().bytes, plan.build().bytes);
    let directory = tempfile::tempdir().unwrap();
    for (a, b) in [(&bare, &mended), (&mended, &bare)] {
        let refused = diff(&open(a.clone()), &open(b.clone()), directory.path(), &DiffOptions::default());

        assert!(matches!(refused, Err(ImageError::NoBitmaps { .. })), "{refused:?}");
    }
}
