//! Extracts memory from an image.

use std::collections::BTreeMap;

use sterna_image::tools::architecture::Architecture;
use sterna_image::tools::extract::{ExtractOptions, Part, extract};
use sterna_image::{Image, ImageError};

use super::sample::{PAGE, Plan, fill, holds, open};
use crate::common::vector;

fn content(block: usize, count: usize) -> Vec<u8> {
    let page = |page| vec![if holds(block, page) { fill(block, page) } else { 0 }; PAGE];
    (0..count).flat_map(page).collect()
}

fn take(image: &Image, part: Part, options: &ExtractOptions) -> Result<Vec<u8>, ImageError> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("out");
    let done = extract(image, &part, &file, options);
    assert_eq!(file.exists(), done.is_ok());
    assert_eq!(
        std::fs::read_dir(directory.path()).unwrap().count(),
        usize::from(done.is_ok()),
        "nothing else stays"
    );
    done.map(|_| std::fs::read(&file).unwrap())
}

#[test]
fn extract_block_gives_its_bytes() {
    let image = open(Plan::default().build().bytes);

    let bytes = take(&image, Part::Block("pc.ram".into()), &ExtractOptions::default()).unwrap();

    assert_eq!(bytes, content(0, 150));
}

#[test]
fn extract_range_at_any_byte_gives_its_bytes() {
    let image = open(Plan::default().build().bytes);
    let ram = content(0, 150);

    for (start, length) in [(0, 1), (5, 4096), (4095, 2), (0x1fff, 0x8002), (1, 150 * PAGE - 2)] {
        let part = Part::Range { start: start as u64, length_bytes: length as u64 };
        let bytes = take(&image, part, &ExtractOptions::default()).unwrap();
        assert!(bytes == ram[start..start + length], "{start:#x}:{length:#x}");
    }
}

#[test]
fn extract_range_over_a_hole_in_the_map_is_zeros_there() {
    let image = open(Plan::default().build().bytes);
    let placed = vec![("one".to_owned(), 200 * PAGE as u64)];
    let options = ExtractOptions { placed, ..ExtractOptions::default() };

    let part = Part::Range { start: 149 * PAGE as u64, length_bytes: 60 * PAGE as u64 };
    let bytes = take(&image, part, &options).unwrap();

    assert_eq!(bytes[..PAGE], content(0, 150)[149 * PAGE..]);
    assert!(bytes[PAGE..51 * PAGE].iter().all(|byte| *byte == 0));
    assert_eq!(bytes[51 * PAGE..52 * PAGE], content(3, 1));
}

#[test]
fn extract_what_is_not_there_is_refused_and_leaves_nothing() {
    let image = open(Plan::default().build().bytes);
    for part in [
        Part::Block("nobody".into()),
        Part::Range { start: 1 << 40, length_bytes: 4096 },
        Part::Range { start: 0, length_bytes: 0 },
        Part::Range { start: u64::MAX, length_bytes: 2 },
    ] {
        let error = take(&image, part.clone(), &ExtractOptions::default()).unwrap_err();
        assert!(matches!(error, ImageError::Request(_)), "{part:?}: {error}");
    }
}

#[test]
fn extract_over_a_file_that_is_there_is_refused_unless_forced() {
    let image = open(Plan::default().build().bytes);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("out");
    std::fs::write(&file, "precious").unwrap();
    let part = Part::Block("one".into());

    let refused = extract(&image, &part, &file, &ExtractOptions::default());
    assert!(refused.is_err());
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");

    extract(&image, &part, &file, &ExtractOptions { replace: true, ..ExtractOptions::default() }).unwrap();
    assert_eq!(std::fs::read(&file).unwrap(), content(3, 1));
}

#[test]
fn core_of_real_images_has_memory_at_its_addresses() {
    let mut cores = Vec::new();
    for name in ["file-mapped-ram", "file-legacy"] {
        let image = open(vector(name));
        // The machine type `none` does not identify the architecture.
        let refused = take(&image, Part::Core { is_virtual: false }, &ExtractOptions::default());
        assert!(matches!(refused, Err(ImageError::Request(text)) if text.contains("--arch")));
        let options = ExtractOptions { architecture: Some(Architecture::X86), ..ExtractOptions::default() };
        let core = take(&image, Part::Core { is_virtual: false }, &options).unwrap();
        let loads = loads(&core);
        let ram = image.shape().ram.blocks.iter().max_by_key(|block| block.length_bytes).unwrap();
        let whole = take(&image, Part::Block(ram.name.clone()), &ExtractOptions::default()).unwrap();

        let (offset, length) = loads[&0];
        assert_eq!(length, whole.len());
        assert!(core[offset..offset + length] == whole, "{name}");
        cores.push(whole);
    }
    assert!(cores[0] == cores[1], "both forms hold the same memory");
}

#[test]
fn core_of_devices_without_processors_has_no_registers_and_says_so() {
    let image = open(Plan::default().build().bytes);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("core");

    // The address of block "one" is unknown.
    let options = ExtractOptions { partial: true, ..ExtractOptions::default() };
    let done = extract(&image, &Part::Core { is_virtual: true }, &file, &options).unwrap();

    assert_eq!((done.segments, done.processors), (2, 0));
    assert!(done.notes.iter().any(|note| note.contains("no registers")), "{:?}", done.notes);
    assert!(done.notes.iter().any(|note| note.contains("one")), "{:?}", done.notes);
}

#[test]
fn core_is_of_the_machines_processors_or_refused() {
    // Machine, RAM block, the user's choice; expected ELF number, byte order (1 little, 2 big), address of RAM.
    let aarch64 = ("virt-10.0", "mach-virt.ram", None, Some((183u16, 1u8, 1u64 << 30)));
    let s390x = ("s390-ccw-virtio-10.0", "s390.ram", None, Some((22, 2, 0)));
    let power = |given, order| ("pseries-10.0", "ppc_spapr.ram", given, Some((21, order, 0)));
    let x86 = ("pc-q35-10.0", "pc.ram", None, Some((62, 1, 0)));
    for (machine, ram, given, expected) in [
        aarch64,
        s390x,
        power(Some(Architecture::Ppc64), 2),
        power(Some(Architecture::Ppc64Le), 1),
        ("pseries-10.0", "ppc_spapr.ram", None, None),
        ("of-nobody", "ram", None, None),
        x86,
    ] {
        let blocks = vec![(ram, 150)];
        let image = open(Plan { machine, blocks, ..Plan::default() }.build().bytes);
        let options = ExtractOptions { architecture: given, ..ExtractOptions::default() };

        let core = take(&image, Part::Core { is_virtual: false }, &options);
        let tables = take(&image, Part::Core { is_virtual: true }, &options);

        let Some((number, order, base)) = expected else {
            assert!(matches!(core, Err(ImageError::Request(text)) if text.contains("--arch")), "{machine}");
            continue;
        };
        let core = core.unwrap();
        assert_eq!(&core[..7], [0x7f, b'E', b'L', b'F', 2, order, 1], "{machine}");
        let read16 = |at: usize| match order {
            1 => u16::from_le_bytes([core[at], core[at + 1]]),
            _ => u16::from_be_bytes([core[at], core[at + 1]]),
        };
        let read64 = |at: usize| {
            let bytes: [u8; 8] = core[at..at + 8].try_into().unwrap();
            if order == 1 { u64::from_le_bytes(bytes) } else { u64::from_be_bytes(bytes) }
        };
        assert_eq!((read16(16), read16(18), read16(54), read16(56)), (4, number, 56, 2), "{machine}");
        // The first program header describes the empty notes. RAM's header follows.
        let load = read64(32) as usize + 56;
        let (offset, physical, length) = (read64(load + 8) as usize, read64(load + 24), read64(load + 32));
        assert_eq!((physical, length), (base, 150 * PAGE as u64), "{machine}");
        assert!(core[offset..offset + 150 * PAGE] == content(0, 150), "{machine}");
        assert_eq!(tables.is_ok(), number == 62, "{machine}: page tables are followed for x86 only");
    }
}

#[test]
fn range_of_a_machine_that_is_not_known_is_refused_until_the_user_says_where_its_ram_is() {
    const GIB: u64 = 1 << 30;
    let ram =
        |machine, block| open(Plan { machine, blocks: vec![(block, 150)], ..Plan::default() }.build().bytes);
    let at = |start| Part::Range { start, length_bytes: 150 * PAGE as u64 };
    let options = |architecture| ExtractOptions { architecture, ..ExtractOptions::default() };
    for (machine, block, given, start, wanted) in [
        ("virt", "riscv_virt_board.ram", None, 0, Err("--arch")),
        ("virt", "riscv_virt_board.ram", None, 2 * GIB, Err("--arch")),
        ("virt", "riscv_virt_board.ram", Some(Architecture::Riscv64), 2 * GIB, Ok(())),
        ("virt-10.0", "m68k_virt.ram", None, GIB, Err("--arch")),
        ("virt-10.0", "mach-virt.ram", None, GIB, Ok(())),
        ("virt-10.0", "mach-virt.ram", None, 0, Err("there is no RAM at")),
        ("sbsa-ref", "sbsa-ref.ram", None, GIB, Err("--at sbsa-ref.ram=")),
        ("s390-ccw-virtio-10.0", "s390.ram", None, 0, Ok(())),
    ] {
        let taken = take(&ram(machine, block), at(start), &options(given));

        match (taken, wanted) {
            (Ok(bytes), Ok(())) => assert!(bytes == content(0, 150), "{machine}"),
            (Err(ImageError::Request(why)), Err(word)) => assert!(why.contains(word), "{machine}: {why}"),
            (taken, _) => panic!("{machine}, {block} at {start:#x}: {:?}", taken.map(|bytes| bytes.len())),
        }
    }
    let placed = vec![("riscv_virt_board.ram".to_owned(), GIB)];
    let by_hand = ExtractOptions { placed, ..ExtractOptions::default() };
    let taken = take(&ram("virt", "riscv_virt_board.ram"), at(GIB), &by_hand).unwrap();
    assert!(taken == content(0, 150));
}

#[test]
fn core_with_an_address_or_processors_by_the_machines_name_says_so() {
    let directory = tempfile::tempdir().unwrap();
    for (machine, block, is_assumed, is_arm) in [
        ("virt-10.0", "mach-virt.ram", true, true),
        ("s390-ccw-virtio-10.0", "s390.ram", true, false),
        ("pc-q35-10.0", "pc.ram", false, false),
    ] {
        let image = open(Plan { machine, blocks: vec![(block, 150)], ..Plan::default() }.build().bytes);
        let file = directory.path().join(machine);

        let part = Part::Core { is_virtual: false };
        let notes = extract(&image, &part, &file, &ExtractOptions::default()).unwrap().notes;

        let says = |words: &str| notes.iter().any(|note| note.contains(words));
        assert_eq!(says("RAM is assumed to begin at"), is_assumed, "{machine}: {notes:?}");
        assert_eq!(says("32-bit"), is_arm, "{machine}: {notes:?}");
    }
}

#[test]
fn extract_onto_the_image_itself_is_refused_even_if_forced() {
    let directory = tempfile::tempdir().unwrap();
    let (path, link) = (directory.path().join("image"), directory.path().join("link"));
    let bytes = Plan::default().build().bytes;
    std::fs::write(&path, &bytes).unwrap();
    std::fs::hard_link(&path, &link).unwrap();
    let image = Image::open(&path).unwrap();
    let forced = ExtractOptions { replace: true, ..ExtractOptions::default() };
    for to in [&path, &link] {
        let refused = extract(&image, &Part::Block("one".into()), to, &forced);

        assert!(matches!(refused, Err(ImageError::SameFile { .. })), "{refused:?}");
        assert!(std::fs::read(to).unwrap() == bytes);
    }
}

#[test]
fn extract_of_a_background_snapshot_without_bitmaps_is_refused() {
    let image = open(Plan { has_end: false, has_bitmaps: false, ..Plan::default() }.build().bytes);

    let refused = take(&image, Part::Block("pc.ram".into()), &ExtractOptions::default());

    assert!(image.lacks_bitmaps() && matches!(refused, Err(ImageError::NoBitmaps { .. })), "{refused:?}");
    for (has_end, has_bitmaps) in [(true, false), (false, true)] {
        assert!(!open(Plan { has_end, has_bitmaps, ..Plan::default() }.build().bytes).lacks_bitmaps());
    }
}

#[test]
fn core_with_a_block_at_no_multiple_of_the_page_size_is_refused() {
    let image = open(Plan::default().build().bytes);
    for (at, is_fine) in [(1 << 32, true), ((1 << 32) + 8, false)] {
        let options = ExtractOptions { placed: vec![("one".into(), at)], ..ExtractOptions::default() };

        let core = take(&image, Part::Core { is_virtual: false }, &options);

        assert_eq!(core.is_ok(), is_fine, "{at:#x}");
        assert!(is_fine || matches!(core, Err(ImageError::Request(_))));
    }
}

/// Offset and length of each loadable segment, by physical address.
fn loads(core: &[u8]) -> BTreeMap<u64, (usize, usize)> {
    assert!(core.starts_with(b"\x7fELF\x02\x01\x01"));
    let number = |at: usize, bytes: usize| {
        core[at..at + bytes].iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let (first, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    assert_eq!((number(16, 2), size), (4, 56));
    (0..count)
        .map(|index| (first + index * size) as usize)
        .filter(|at| number(*at, 4) == 1)
        .map(|at| {
            assert_eq!(number(at + 32, 8), number(at + 40, 8), "file and memory size");
            (number(at + 24, 8), (number(at + 8, 8) as usize, number(at + 32, 8) as usize))
        })
        .collect()
}
