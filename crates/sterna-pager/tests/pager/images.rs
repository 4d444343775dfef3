//! Images as sources: every way in which their pages are read.

use std::sync::Arc;

use sterna_image::convert::{ConvertOptions, Input, Output, convert};
use sterna_image::{BlockShape, Format, MappedOptions, MappedWriter, PageVisitor, Shape};
use sterna_pager::{FillRate, ImageMemory, PageSource, PagerOptions, SourceError, StoredMemory, WorkingSet};
use sterna_store::{StoredImage, put_working_set};

use crate::common::{MIB, World, served, until};

/// Writes the world's memory as an image of two blocks.
fn image(world: &World, split: u64) -> std::path::PathBuf {
    let path = world.path("mapped");
    let mut shape = Shape { has_configuration: true, has_end: true, has_eof: true, ..Shape::empty() };
    shape.configuration.machine_type = "none".into();
    shape.ram.footers = true;
    for (name, length_bytes) in [("m0", split), ("m1", world.memory.len() as u64 - split)] {
        shape.ram.blocks.push(BlockShape {
            name: name.into(),
            length_bytes,
            address: None,
            host_page_bytes: None,
            is_skipped: false,
        });
    }
    let writer = MappedWriter::create(&path, &shape, MappedOptions::default()).unwrap();
    let mut lane = writer.lane();
    let (first, second) = world.memory.split_at(split as usize);
    for (block, memory) in [first, second].into_iter().enumerate() {
        for (page, content) in memory.chunks(4096).enumerate() {
            if content.iter().any(|byte| *byte != 0) {
                lane.pages(block, page as u64, content).unwrap();
            }
        }
    }
    lane.drain().unwrap();
    writer.complete(&shape).unwrap();
    path
}

#[test]
fn images_of_every_access_have_the_same_memory() {
    let world = World::new(2 * MIB);
    let mapped = image(&world, MIB + 4096);
    for format in [Format::MappedRam, Format::Legacy, Format::LegacyZstd] {
        let path = world.path(&format!("{format:?}"));
        let options = ConvertOptions { target: Some(format), ..ConvertOptions::default() };
        convert(Input::File(mapped.clone()), Output::File(path.clone()), &options).unwrap();

        let memory = ImageMemory::open(&path, None).unwrap();

        assert_eq!(memory.len_bytes(), 2 * MIB);
        let mut all = vec![1; 2 << 20];
        memory.read(0, &mut all).unwrap();
        assert!(all == world.memory, "{format:?}");
        let mut part = vec![1; 3 * 4096 + 100];
        memory.read(MIB - 50, &mut part).unwrap();
        assert!(part == world.memory[MIB as usize - 50..][..part.len()], "{format:?}");
        for page in 0..512 {
            let content = &world.memory[page * 4096..][..4096];
            let is_zero = content.iter().all(|byte| *byte == 0);
            assert_eq!(memory.is_zero(page as u64 * 4096, 4096), is_zero, "{format:?}, page {page}");
        }
        assert!(!memory.is_zero(0, 2 * MIB));
    }
}

#[test]
fn guest_of_an_image_has_its_blocks_one_after_the_other() {
    let world = World::new(2 * MIB);
    let source = Arc::new(ImageMemory::open(&image(&world, MIB), None).unwrap());
    let pager = world.pager_of(source, PagerOptions { fill: FillRate::Max, ..PagerOptions::default() });
    let name = "guest_of_an_image_has_its_blocks_one_after_the_other";
    let Some(mut guest) = served(name, &[MIB / 2, 3 * MIB / 2], &world.socket()) else { return };

    assert_eq!(guest.sum(0, 2 * MIB), Ok(world.sum(0, 2 * MIB)));
    until(&pager, "the release", |guests| guests[0].is_over());
}

/// The guest's faults decompress frames, each one once, and whole frames are placed.
#[test]
fn guest_of_a_compressed_image_is_served_frame_by_frame() {
    let world = World::new(4 * MIB);
    let (mapped, path) = (image(&world, MIB), world.path("sterna"));
    let options = ConvertOptions { target: Some(Format::Sterna), ..ConvertOptions::default() };
    convert(Input::File(mapped), Output::File(path.clone()), &options).unwrap();
    let memory = StoredMemory::new(StoredImage::open(&path, None).unwrap()).unwrap();
    assert!(memory.is_zero(3 * 4096, 4096) && !memory.is_zero(0, 4 * MIB));
    let mut part = vec![1; 5000];
    memory.read(MIB - 100, &mut part).unwrap();
    assert!(part == world.memory[MIB as usize - 100..][..5000]);

    let options = PagerOptions { fill: FillRate::Off, ..PagerOptions::default() };
    let pager = world.pager_of(Arc::new(memory), options);
    let name = "guest_of_a_compressed_image_is_served_frame_by_frame";
    let Some(mut guest) = served(name, &[4 * MIB], &world.socket()) else { return };
    assert_eq!(guest.sum(0, 4 * MIB), Ok(world.sum(0, 4 * MIB)));
    until(&pager, "the release", |guests| guests[0].is_over());
}

/// What the image names as its working set is filled before the rest, without an option.
#[test]
fn working_set_in_the_image_is_filled_first() {
    let name = "working_set_in_the_image_is_filled_first";
    let world = World::new(32 * MIB);
    let (mapped, path) = (image(&world, MIB), world.path("sterna"));
    let options = ConvertOptions { target: Some(Format::Sterna), ..ConvertOptions::default() };
    convert(Input::File(mapped), Output::File(path.clone()), &options).unwrap();
    let open = || StoredMemory::new(StoredImage::open(&path, None).unwrap()).unwrap();
    let touched = WorkingSet { memory_bytes: 32 * MIB, runs: vec![(20 * MIB, MIB), (MIB - 4096, 8192)] };
    let ranges = open().ranges(&touched);
    assert_eq!(ranges.len(), 3, "the last run is in two blocks");
    put_working_set(&path, None, open().image().digest(), &ranges).unwrap();

    // So slow that the test can see which pages come first.
    let options = PagerOptions { fill: FillRate::BytesPerSecond(2 << 20), ..PagerOptions::default() };
    let pager = world.pager_of(Arc::new(open()), options);
    let Some(mut guest) = served(name, &[32 * MIB], &world.socket()) else { return };
    let pages = (MIB + (128 << 10)) / 4096;
    until(&pager, "the first fill", |guests| {
        guests.first().is_some_and(|guest| guest.total_pages - guest.missing_pages >= pages)
    });
    assert_eq!(guest.sum(20 * MIB, MIB), Ok(world.sum(20 * MIB, MIB)));
    assert_eq!(guest.sum(MIB - 4096, 8192), Ok(world.sum(MIB - 4096, 8192)));
    assert_eq!(pager.guests()[0].faults, 0);
}

#[test]
fn image_that_changes_is_not_read_any_more() {
    let world = World::new(MIB);
    let path = image(&world, MIB / 2);
    let memory = ImageMemory::open(&path, None).unwrap();
    let file = std::fs::File::options().append(true).open(&path).unwrap();
    std::io::Write::write_all(&mut &file, b"more").unwrap();

    let mut page = [0; 4096];
    assert!(matches!(memory.read(0, &mut page), Err(SourceError::Image(_))));
    assert!(memory.read_now(0, &mut page).is_err());
}
