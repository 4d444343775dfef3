//! Invalid input: truncated anywhere, flipped bits, wrong offsets. Each case gives an error, no panic, and uses
//! little memory.

use std::io::Write;
use std::sync::Arc;

use crate::common::{self, Ram, legacy, machine, open};
use sterna_image::compression::Compressor;
use sterna_image::{Compression, Image, ImageError, MappedOptions, MappedWriter};
use sterna_wire::PAGE_SIZE;
use sterna_wire::libvirt::{ByteOrder, SaveHeader};

fn mapped_bytes() -> Vec<u8> {
    let shape = machine();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mapped");
    let options = MappedOptions { alignment: 4096, ..MappedOptions::default() };
    let writer = MappedWriter::create(&path, &shape, options).unwrap();
    let mut lane = writer.lane();
    common::give(&shape, &mut lane).unwrap();
    lane.drain().unwrap();
    writer.complete(&shape).unwrap();
    std::fs::read(path).unwrap()
}

/// Opens an image and reads every page.
fn read_all(bytes: &[u8]) -> Result<(Image, Ram), ImageError> {
    let image = open(bytes)?;
    // A flipped bit can make a block very long. Then pages are missing, and the test does not allocate the block.
    let bound = 64 << 20;
    if image.shape().ram_bytes() > bound {
        return Ok((image, Ram::default()));
    }
    let ram = Ram::read(&image)?;
    Ok((image, ram))
}

#[test]
fn image_cut_at_every_byte_is_told() {
    for whole in [legacy(&machine()), mapped_bytes()] {
        let (image, ram) = read_all(&whole).unwrap();
        let description = image.shape().description.as_ref().unwrap().len();
        let eof = whole.len() - description - 6;
        for length in 0..whole.len() {
            match read_all(&whole[..length]) {
                Ok((cut, same)) => {
                    // Only the devices may be truncated. Bytes after the complete devices do not count as truncation.
                    assert!(length >= eof - image.shape().devices.len(), "{length}");
                    assert_eq!(cut.shape().has_eof, length > eof, "{length}");
                    assert!(cut.shape().description.is_none() && same == ram, "{length}");
                }
                Err(error) => {
                    assert!(length <= eof, "{length}: {error}");
                    assert!(error.is_image_at_fault(), "{length}: {error}");
                    assert!(error.to_string().starts_with("small"), "{length}: {error}");
                }
            }
        }
    }
}

#[test]
fn image_with_any_bit_flipped_never_panics() {
    for whole in [legacy(&machine()), mapped_bytes()] {
        // Every bit of the structure, but not of the pages.
        let ram = whole.windows(3).position(|window| window == b"ram").unwrap();
        let structure = (0..ram + 300).chain(whole.len() - 700..whole.len());
        for at in structure {
            for bit in 0..8 {
                let mut flipped = whole.clone();
                flipped[at] ^= 1 << bit;
                if let Err(error) = read_all(&flipped) {
                    assert!(error.to_string().contains("specs/") || error.is_image_at_fault(), "{error}");
                }
            }
        }
    }
}

#[test]
fn compressed_image_with_any_byte_changed_never_panics() {
    for compression in Compression::all() {
        let mut compressor = Compressor::new(Vec::new(), compression, 1);
        compressor.write_all(&legacy(&machine())).unwrap();
        let compressed = compressor.finish().unwrap();
        let (image, _) = read_all(&compressed).unwrap();
        assert_eq!(image.format().compression(), compression);
        for at in (0..compressed.len()).step_by(1 + compressed.len() / 200) {
            let mut changed = compressed.clone();
            changed[at] ^= 0x24;
            // All formats have checksums, but not over every byte of their headers.
            if let Ok((image, _)) = read_all(&changed) {
                assert!(*image.shape() == machine(), "{compression:?}, byte {at}");
            }
            assert!(read_all(&compressed[..at]).is_err(), "{compression:?} cut to {at}");
        }
    }
}

/// Opens a mapped-ram image after a change to the header of its first block.
fn with_header(change: impl FnOnce(&mut [u8])) -> Result<(Image, Ram), ImageError> {
    let mut bytes = mapped_bytes();
    let at = bytes.windows(3).position(|window| window == b"\x02m0").unwrap() + 3 + 8;
    change(&mut bytes[at..at + 28]);
    read_all(&bytes)
}

#[test]
fn mapped_header_that_points_astray_is_refused_with_the_rule() {
    let put = |at: usize, value: u64| {
        with_header(move |header| header[at..at + 8].copy_from_slice(&value.to_be_bytes()))
    };
    let (bitmap, pages) = (12, 20);
    for (at, value, rule) in [
        (bitmap, 0, "overlap"),
        (bitmap, 0x2000, "overlap"),
        (bitmap, 0x7100, "overlap"),
        (bitmap, 1 << 40, "beyond the file"),
        (bitmap, u64::MAX, "beyond the file"),
        (pages, 0x1200, "multiple of 4096"),
        (pages, 1 << 40, "ends"),
        (pages, 1 << 63, "2^63"),
        (pages, 0, "name"),
        (4, 2048, "2048 bytes"),
        (4, 1 << 40, "bytes, not 4096"),
    ] {
        let error = put(at, value).unwrap_err().to_string();
        assert!(error.contains(rule), "{at}, {value:#x}: {error}");
    }
    for (version, is_fine) in [(0, true), (1, true), (2, false)] {
        let read = with_header(|header| header[..4].copy_from_slice(&u32::to_be_bytes(version)));
        assert_eq!(read.is_ok(), is_fine, "version {version}");
    }
}

#[test]
fn bits_beyond_the_last_page_are_ignored() {
    let (image, ram) = read_all(&mapped_bytes()).unwrap();
    let mut bytes = mapped_bytes();
    let bitmap = image.mapped().unwrap().blocks()[0].bitmap_offset as usize;
    bytes[bitmap] |= 0xf8;
    bytes[bitmap + 1..bitmap + 8].fill(0xff);

    let (changed, same) = read_all(&bytes).unwrap();

    assert!(same == ram);
    assert_eq!(changed.mapped().unwrap().blocks()[0].bitmap.count(), 2);
}

#[test]
fn page_under_a_clear_bit_is_zero_whatever_lies_there() {
    let (image, ram) = read_all(&mapped_bytes()).unwrap();
    let mut bytes = mapped_bytes();
    let pages = image.mapped().unwrap().blocks()[0].pages_offset as usize;
    bytes[pages + PAGE_SIZE..pages + 2 * PAGE_SIZE].fill(0x5a);

    assert!(read_all(&bytes).unwrap().1 == ram);
}

#[test]
fn block_list_that_lies_is_refused() {
    let whole = legacy(&machine());
    let list = whole.windows(3).position(|window| window == b"\x02m0").unwrap();
    let put = |at: usize, bytes: &[u8]| {
        let mut changed = whole.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        read_all(&changed).map(|_| ()).unwrap_err().to_string()
    };
    let (total, length) = (list - 8, list + 3);
    // Two blocks: m0 of 0x3000 bytes, rom of 0x2000.
    assert!(put(total, &0x6004u64.to_be_bytes()).contains("not listed yet"));
    assert!(put(total, &0x4004u64.to_be_bytes()).contains("the rest of the total"));
    assert!(put(total, &0x5008u64.to_be_bytes()).contains("MEM_SIZE"));
    assert!(put(total, &(u64::MAX << 12 | 4).to_be_bytes()).contains("more than"));
    assert!(put(length, &0x3001u64.to_be_bytes()).contains("multiple of 4096"));
    assert!(put(length, &u64::MAX.to_be_bytes()).contains("the rest of the total"));
    assert!(put(list + 11, b"\x03\0om").contains("no block name"));

    let mut twice = machine();
    twice.ram.blocks[1].name = "m0".to_owned();
    let error = open(&legacy(&twice)).err().unwrap().to_string();
    assert!(error.contains("occurs twice"), "{error}");
}

#[test]
fn record_that_cannot_be_is_refused() {
    let whole = legacy(&machine());
    // The first record names m0. The second, a zero page, continues the same block.
    let part = whole.windows(5).position(|window| window == [2, 0, 0, 0, 5]).unwrap() + 5;
    let second = part + 8 + 3 + PAGE_SIZE;
    let put = |at: usize, bytes: &[u8]| {
        let mut changed = whole.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        read_all(&changed).map(|_| ()).unwrap_err().to_string()
    };
    assert!(put(part, &0x3008u64.to_be_bytes()).contains("beyond block"));
    assert!(put(part, &0x28u64.to_be_bytes()).contains("CONTINUE"));
    assert!(put(part, &0x80u64.to_be_bytes()).contains("not a page record"));
    assert!(put(part, &0x200u64.to_be_bytes()).contains("not a page record"));
    assert!(put(part + 9, b"mX").contains("not in the block list"));
    assert!(put(second + 8, &[1]).contains("zero page of bytes 01"));
    assert!(put(second, &0x1064u64.to_be_bytes()).contains("not a page record"));
}

#[test]
fn record_of_a_page_in_a_mapped_image_is_refused() {
    let whole = mapped_bytes();
    let mark = [&3u8.to_be_bytes()[..], &5u32.to_be_bytes(), &0x10u64.to_be_bytes()].concat();
    let end = whole.windows(mark.len()).position(|window| window == mark).unwrap();
    let mut changed = whole;
    changed[end + 12] = 0x08;

    let error = read_all(&changed).unwrap_err().to_string();

    assert!(error.contains("must be empty in a mapped-ram image"), "{error}");
}

/// Opens a libvirt image of the machine after a change to its header.
fn libvirt(change: impl FnOnce(&mut SaveHeader)) -> Result<Image, ImageError> {
    let texts = b"<domain/>\0<cookie/>\0";
    let mut header = SaveHeader {
        is_complete: true,
        byte_order: ByteOrder::Little,
        version: 2,
        data_length: texts.len() as u32 + 100,
        was_running: 1,
        format: 0,
        cookie_offset: 10,
    };
    change(&mut header);
    let mut bytes = Vec::new();
    header.encode(&mut bytes);
    bytes.extend_from_slice(texts);
    bytes.resize(bytes.len() + 100, 0);
    bytes.extend_from_slice(&legacy(&machine()));
    Image::open_source(Arc::new(bytes), "small")
}

#[test]
fn libvirt_header_that_libvirt_restores_opens() {
    for change in [
        (|_| {}) as fn(&mut SaveHeader),
        |header| header.byte_order = ByteOrder::Big,
        |header| header.version = 0,
        |header| header.version = 1,
        |header| header.was_running = 2,
        |header| header.cookie_offset = 0,
        |header| header.cookie_offset = header.data_length,
    ] {
        let image = libvirt(change).unwrap();
        assert!(*image.shape() == machine());
        assert_eq!(image.stream_offset(), 92 + 120);
    }
}

#[test]
fn libvirt_header_that_lies_is_refused_in_one_sentence() {
    for (change, says) in [
        ((|header| header.is_complete = false) as fn(&mut SaveHeader), "never finished"),
        (|header| header.version = 3, "version 3 of the save image is unknown"),
        (
            |header| {
                header.version = 3;
                header.byte_order = ByteOrder::Big;
            },
            "version 3 of the save image is unknown",
        ),
        (|header| header.format = 7, "format 7"),
        (|header| header.format = 6, "is sparse"),
        (|header| header.format = 5, "zstd"),
        (|header| header.data_length = 0, "is 0"),
        (|header| header.data_length = 0x7fff_ffff, "are announced"),
        (|header| header.cookie_offset = header.data_length + 1, "is beyond the data"),
        (|header| header.data_length -= 7, "not an image"),
        (
            |header| {
                header.data_length = 5;
                header.cookie_offset = 0;
            },
            "does not end with a NUL",
        ),
    ] {
        let error = libvirt(change).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(
            error.contains(says) || (says == "not an image" && error.contains("magic")),
            "{says}: {error}"
        );
    }
}

#[test]
fn file_that_is_no_image_is_told_by_its_first_bytes() {
    for (bytes, says) in [
        (&b"\x7fELF\x02\x01\x01"[..], "not an image"),
        (b"", "ends at byte 0"),
        (b"QEVM", "inside the header"),
        (b"QEVM\0\0\0\x02", "version 2"),
        (b"QFI\xfb and so on", "not an image"),
    ] {
        let error = open(bytes).err().unwrap().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn image_that_changes_while_it_is_read_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    std::fs::write(&path, mapped_bytes()).unwrap();
    let image = Image::open(&path).unwrap();
    image.check_unchanged().unwrap();

    let file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() + 1).unwrap();

    assert!(matches!(image.visit_pages(&mut Ram::of(image.shape())), Err(ImageError::Changed { .. })));
}

#[test]
fn image_that_shrinks_while_it_is_read_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a");
    std::fs::write(&path, mapped_bytes()).unwrap();
    let image = Image::open(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(0x1000).unwrap();

    let error = image.visit_pages(&mut Ram::of(image.shape())).unwrap_err();

    assert!(matches!(error, ImageError::Torn { .. } | ImageError::Changed { .. }), "{error}");
}
