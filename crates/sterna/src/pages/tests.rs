//! Tests of lanes that write to a file.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use sterna_ram::dirty::SoftwareLog;
use sterna_ram::{Backing, DirtyBitmaps, DirtySource, GuestRam, PAGE_SIZE, RamBlock};
use sterna_transport::{CreateOptions, Direct, PageFile, TransportError};
use sterna_wire::mapped_ram::{MappedHeader, bitmap_bytes, holds_page};

use super::{FileWriter, MappedFile, PageWriter};
use crate::error::{Fault, MigrationError};
use crate::order::{LaneCursor, PageRun, RoundPages, SliceSize, Taken};
use sterna_testing::SmallDisk;

const LANES: usize = 3;

/// A guest whose RAM a test writes.
struct Plain {
    ram: GuestRam,
    log: SoftwareLog,
}

impl Plain {
    /// Fills a page of block 0 with `byte`.
    fn write(&self, page: u64, byte: u8) {
        self.ram.block(0).write(page * PAGE_SIZE as u64, &[byte; PAGE_SIZE]).unwrap();
    }
}

/// A guest with two blocks. Pages of the first hold bytes, hold zeros, or were never populated.
fn guest() -> Plain {
    let block = |name: &str, pages: u64| {
        RamBlock::new(name, pages * PAGE_SIZE as u64, Backing::Memfd).expect("a block")
    };
    let ram = GuestRam::new(vec![block("low", 3000), block("high", 700)]).unwrap();
    let vm = Plain { log: SoftwareLog::new(&ram), ram };
    for page in (0..3000).filter(|page| page % 7 < 3) {
        vm.write(page, if page % 7 == 0 { 0 } else { (page % 250) as u8 + 1 });
    }
    vm.ram.block(1).write(699 * PAGE_SIZE as u64 + 5, b"the last page").unwrap();
    vm
}

/// Distributes every page of `vm` to `LANES` lanes in parallel. Each lane calls `lane` for its runs.
fn over_lanes<F>(vm: &Plain, lane: F)
where
    F: Fn(usize) -> Box<dyn FnMut(Taken) -> Result<(), MigrationError>> + Sync,
{
    vm.log.start().unwrap();
    let all = DirtyBitmaps::new(&vm.ram);
    all.set_all();
    let round = RoundPages::new(1, &vm.ram, SliceSize::default(), all, true);
    std::thread::scope(|scope| {
        for index in 0..LANES {
            let (round, lane) = (&round, &lane);
            scope.spawn(move || {
                let mut act = lane(index);
                let mut at = LaneCursor::default();
                while let Some(taken) = round.take(&mut at, 128, &vm.ram, &vm.log).unwrap() {
                    act(taken).unwrap();
                }
            });
        }
    });
    vm.log.stop().unwrap();
}

/// A lane into `image` that looks for zero pages as the engine's lanes do.
fn file_lane(image: &Arc<MappedFile>, ram: &GuestRam) -> Box<dyn FnMut(Taken) -> Result<(), MigrationError>> {
    let (mut writer, ram) = (FileWriter::new(Arc::clone(image), ram), ram.clone());
    Box::new(move |taken| {
        if taken.absent {
            return writer.absent_run(taken.run);
        }
        for page in taken.run.first..taken.run.end() {
            let run = PageRun { first: page, count: 1, ..taken.run };
            let zero = ram.block(run.block).page(page)?.is_zero()?;
            if zero { writer.zero_run(run)? } else { writer.write_run(run)? }
        }
        writer.barrier()
    })
}

/// A directory on a disk: the one of this test program.
fn directory_on_disk() -> std::path::PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

/// A file at `path` for the pages of `ram`, without other content than the room for the bitmaps.
fn image_of(path: &Path, ram: &GuestRam) -> Result<(Arc<MappedFile>, Vec<MappedHeader>), TransportError> {
    let file = PageFile::create(path, CreateOptions { direct: Direct::Wanted, ..Default::default() })?;
    let mut at = 0;
    let place = |block: &RamBlock| {
        let header = MappedHeader::place(at, block.len_bytes()).unwrap();
        at = header.end_of_pages(block.len_bytes());
        header
    };
    let headers: Vec<_> = ram.blocks().iter().map(place).collect();
    Ok((Arc::new(MappedFile::new(Arc::new(file), headers.clone(), ram)), headers))
}

#[test]
fn image_written_over_many_lanes_holds_every_page_and_holes_for_the_rest() {
    let directory = tempfile::tempdir_in(directory_on_disk()).unwrap();
    let path = directory.path().join("guest.img");
    let vm = guest();
    let (image, headers) = image_of(&path, &vm.ram).unwrap();
    over_lanes(&vm, |_| file_lane(&image, &vm.ram));
    image.write_bitmaps().unwrap();
    assert!(!path.exists(), "it is there before it is complete");
    let held = image.held_pages();
    image.file().complete().unwrap();

    let file = std::fs::read(&path).unwrap();
    let mut marked = 0;
    for (index, header) in headers.iter().enumerate() {
        let block = vm.ram.block(index);
        let bitmap = &file[header.bitmap_offset as usize..][..bitmap_bytes(block.len_bytes()) as usize];
        let mut content = [0; PAGE_SIZE];
        for page in 0..block.pages() {
            block.read(page * PAGE_SIZE as u64, &mut content).unwrap();
            let holds = holds_page(bitmap, page);
            assert!(holds || content == [0; PAGE_SIZE], "block {index} page {page}");
            let place = header.page_offset(page) as usize;
            let stands: &[u8] = file.get(place..place + PAGE_SIZE).unwrap_or(&[0; PAGE_SIZE]);
            assert!(stands == content, "block {index} page {page}");
            marked += u64::from(holds);
        }
    }
    assert_eq!(marked, held);
    // Pages that are not in the file use no disk space: only the bitmaps do, besides the pages.
    let on_disk = std::fs::metadata(&path).unwrap().blocks() * 512;
    assert!(on_disk <= held * PAGE_SIZE as u64 + (64 << 10), "{on_disk} bytes for {held} pages");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn image_page_that_became_zero_leaves_neither_a_bit_nor_its_bytes() {
    let directory = tempfile::tempdir_in(directory_on_disk()).unwrap();
    let path = directory.path().join("guest.img");
    let vm = guest();
    let (image, headers) = image_of(&path, &vm.ram).unwrap();
    let mut writer = FileWriter::new(Arc::clone(&image), &vm.ram);
    let run = |first, count| PageRun { block: 0, first, count };
    for page in 0..100 {
        vm.write(page, 7);
    }
    writer.write_run(run(0, 100)).unwrap();
    writer.barrier().unwrap();
    // A few zero pages between others are written as well. Many zero pages, or zero pages at the end, are not.
    for page in (10..12).chain(40..70).chain(98..100) {
        vm.write(page, 0);
    }
    writer.write_run(run(8, 2)).unwrap();
    writer.zero_run(run(10, 2)).unwrap();
    writer.write_run(run(12, 1)).unwrap();
    writer.zero_run(run(40, 30)).unwrap();
    writer.write_run(run(97, 1)).unwrap();
    writer.zero_run(run(98, 2)).unwrap();
    writer.barrier().unwrap();
    image.write_bitmaps().unwrap();
    image.file().complete().unwrap();

    let file = std::fs::read(&path).unwrap();
    let bitmap = &file[headers[0].bitmap_offset as usize..headers[0].pages_offset as usize];
    for page in 0..100 {
        let is_zero = (10..12).contains(&page) || (40..70).contains(&page) || page >= 98;
        assert_eq!(holds_page(bitmap, page), !is_zero || page < 12, "page {page}");
        let place = headers[0].page_offset(page) as usize;
        let stands: &[u8] = file.get(place..place + PAGE_SIZE).unwrap_or(&[0; PAGE_SIZE]);
        assert!(stands.iter().all(|byte| *byte == if is_zero { 0 } else { 7 }), "page {page}");
    }
}

#[test]
fn image_on_a_full_disk_fails_with_its_reason_and_leaves_nothing() {
    // This needs a disk that is always full and on which a file can be created. /dev/full cannot be replaced by
    // a rename, so the test mounts a file system of 256 KiB. Only root can do that.
    let Some(small) =
        SmallDisk::mount_for("image_on_a_full_disk_fails_with_its_reason_and_leaves_nothing", 256 << 10)
    else {
        return;
    };
    let path = small.path().join("guest.img");
    let vm = guest();
    let (image, _) = image_of(&path, &vm.ram).unwrap();
    let mut writer = FileWriter::new(Arc::clone(&image), &vm.ram);
    let run = |first| PageRun { block: 0, first, count: 128 };
    let written = (0..20).try_for_each(|n| writer.write_run(run(n * 128)));
    let error = written.and_then(|()| writer.barrier()).expect_err("a full disk");
    assert!(matches!(error, MigrationError::System(..)), "{error:?}");
    assert_eq!(error.fault(), Some(Fault::Local));
    writer.abort();
    drop((writer, image));
    let error = error.to_string();
    assert!(error.contains("guest.img") && error.contains("No space left"), "{error}");
    assert_eq!(std::fs::read_dir(small.path()).unwrap().count(), 0);
}
