use super::*;

const PAGES: u64 = 6000;

#[test]
fn staged_pages_are_those_of_the_moment_in_which_they_were_copied() {
    let length = PAGES * PAGE_SIZE as u64;
    let blocks = ["m0", "m1"].map(|name| RamBlock::new(name, length, Backing::Memfd).unwrap());
    let ram = GuestRam::new(blocks.to_vec()).unwrap();
    let content = |block: usize, page: u64| (page * 2 + block as u64 + 1) as u8;
    for block in 0..2 {
        for page in 0..PAGES {
            ram.block(block).write(page * PAGE_SIZE as u64, &[content(block, page)]).unwrap();
        }
    }
    let dirty = DirtyBitmaps::new(&ram);
    // More pages than one thread's share, and pieces that cross the border of a share.
    dirty.block(0).set_range(3, 2500);
    for page in 0..100 {
        dirty.block(1).set(page * 7);
    }
    dirty.block(1).set_range(PAGES - 1000, 1000);
    let staging = CopiedPages::new(&ram, length).unwrap();

    staging.stage(&dirty).unwrap();
    staging.send_next().unwrap();
    (0..2).for_each(|block| ram.block(block).write(0, &vec![0; length as usize]).unwrap());

    let read = |block: usize, first: u64, count: u64| {
        let slice = staging.content(PageRun { block, first, count }).unwrap();
        let mut bytes = vec![0; slice.len()];
        slice.copy_to(&mut bytes).unwrap();
        bytes.chunks(PAGE_SIZE).map(|page| page[0]).collect::<Vec<_>>()
    };
    for (block, first, count) in [(0, 3, 128), (0, 1200, 128), (0, 2500, 3), (1, 14, 1), (1, PAGES - 1, 1)] {
        let wanted: Vec<_> = (first..first + count).map(|page| content(block, page)).collect();
        assert_eq!(read(block, first, count), wanted);
    }
    assert!(staging.content(PageRun { block: 0, first: 2, count: 2 }).is_err());
    assert!(staging.content(PageRun { block: 1, first: 14, count: 2 }).is_err());
    staging.clear();
    assert_eq!(read(0, 3, 1), [0]);
}

#[test]
fn checkpoints_that_wait_share_the_room_and_are_read_in_order() {
    let block = RamBlock::new("m0", 64 * PAGE_SIZE as u64, Backing::Memfd).unwrap();
    let ram = GuestRam::new(vec![block]).unwrap();
    let staging = CopiedPages::new(&ram, 32 * PAGE_SIZE as u64).unwrap();
    let dirty = |first: u64, count: u64| {
        let pages = DirtyBitmaps::new(&ram);
        pages.block(0).set_range(first, count);
        pages
    };
    let write = |byte: u8| ram.block(0).write(0, &vec![byte; 64 * PAGE_SIZE]).unwrap();
    let read = |first: u64| {
        let mut byte = [0; PAGE_SIZE];
        staging.content(PageRun { block: 0, first, count: 1 }).unwrap().copy_to(&mut byte).unwrap();
        byte[0]
    };
    for (byte, first, count) in [(1, 0, 10), (2, 5, 12), (3, 60, 4)] {
        write(byte);
        assert!(staging.has_room(&dirty(0, count)));
        staging.stage(&dirty(first, count)).unwrap();
    }
    write(9);

    // 26 of 32 pages are in use.
    assert!(staging.has_room(&dirty(0, 6)) && !staging.has_room(&dirty(0, 7)));
    assert!(staging.stage(&dirty(0, 7)).is_err());
    assert_eq!(read(5), 9, "nothing is sent yet");
    staging.send_next().unwrap();
    assert_eq!((read(0), read(5)), (1, 1));
    staging.clear();
    // The first ten pages and the six at the end are free again.
    assert!(staging.has_room(&dirty(0, 10)) && !staging.has_room(&dirty(0, 11)));
    staging.stage(&dirty(20, 10)).unwrap();
    staging.stage(&dirty(40, 6)).unwrap();
    assert!(!staging.has_room(&dirty(0, 1)) && staging.has_room(&dirty(0, 0)));
    for (page, byte) in [(5, 2), (16, 2), (63, 3), (20, 9), (45, 9)] {
        if [5, 63, 20, 45].contains(&page) {
            staging.send_next().unwrap();
        }
        assert_eq!(read(page), byte, "page {page}");
    }
    staging.clear();
    assert!(staging.send_next().is_err());
    assert!(staging.has_room(&dirty(0, 32)));
}

/// Blocks `m0` and `m1` of 64 pages, and room for 96.
fn small() -> (GuestRam, CopiedPages) {
    let blocks = ["m0", "m1"].map(|name| RamBlock::new(name, 64 * PAGE_SIZE as u64, Backing::Memfd).unwrap());
    let ram = GuestRam::new(blocks.to_vec()).unwrap();
    let staging = CopiedPages::new(&ram, 96 * PAGE_SIZE as u64).unwrap();
    (ram, staging)
}

fn pages(ram: &GuestRam, runs: &[(usize, u64, u64)]) -> DirtyBitmaps {
    let pages = DirtyBitmaps::new(ram);
    for (block, first, count) in runs {
        pages.block(*block).set_range(*first, *count);
    }
    pages
}

/// The first byte of each page, read in the way that lanes read.
fn read(staging: &CopiedPages, run: PageRun) -> Vec<u8> {
    let (mut rest, mut bytes) = (Some(run), Vec::new());
    while let Some(run) = rest {
        let (run, others) = run.split(staging.together(run));
        let mut content = vec![0; run.count as usize * PAGE_SIZE];
        staging.content(run).unwrap().copy_to(&mut content).unwrap();
        bytes.extend(content.chunks(PAGE_SIZE).map(|page| page[0]));
        rest = others;
    }
    bytes
}

#[test]
fn what_is_written_after_it_was_copied_ahead_is_copied_again() {
    for way in [CheckpointCopy::Copy, CheckpointCopy::CopyOnWrite] {
        let (ram, staging) = small();
        staging.set_way(way);
        let write = |block: usize, first: u64, count: usize, byte: u8| {
            ram.block(block).write(first * PAGE_SIZE as u64, &vec![byte; count * PAGE_SIZE]).unwrap();
        };
        (0..2).for_each(|block| write(block, 0, 64, 1));
        assert!(staging.stage_ahead(&pages(&ram, &[(0, 10, 20), (1, 0, 5)])).unwrap());
        // Two of these pages, and others before, between and after them.
        write(0, 8, 4, 2);
        write(0, 30, 2, 3);
        write(1, 40, 1, 4);
        let late = pages(&ram, &[(0, 8, 4), (0, 30, 2), (1, 40, 1)]);

        staging.prepare(true);
        staging.stage(&late).unwrap();
        staging.go_on();
        (0..2).for_each(|block| write(block, 0, 64, 9));
        staging.send_next().unwrap();

        let run = |block, first, count| PageRun { block, first, count };
        let wanted = [&[2; 4][..], &[1; 18], &[3; 2]].concat();
        assert_eq!(read(&staging, run(0, 8, 24)), wanted, "{way:?}");
        assert_eq!(read(&staging, run(1, 0, 5)), [1; 5]);
        assert_eq!(read(&staging, run(1, 40, 1)), [4]);
        assert!(staging.content(run(0, 8, 4)).is_err(), "they do not lie together");
        assert!(staging.content(run(1, 5, 1)).is_err(), "it was not dirty");
        assert_eq!(staging.copy_counts().ahead_pages, 23);
    }
}

#[test]
fn what_is_copied_ahead_takes_room_until_its_checkpoint_is_sent_or_it_is_dropped() {
    let (ram, staging) = small();
    assert!(staging.stage_ahead(&pages(&ram, &[(0, 0, 60)])).unwrap());
    // 36 pages are free.
    assert!(staging.has_room(&pages(&ram, &[(0, 0, 64), (1, 0, 32)])));
    assert!(!staging.has_room(&pages(&ram, &[(0, 0, 64), (1, 0, 33)])));
    assert!(staging.stage(&pages(&ram, &[(1, 0, 37)])).is_err());
    assert_eq!(staging.drop_ahead(), 60);
    assert!(staging.has_room(&pages(&ram, &[(0, 0, 64), (1, 0, 32)])));

    assert!(staging.stage_ahead(&pages(&ram, &[(0, 0, 60)])).unwrap());
    assert!(
        staging.stage_ahead(&pages(&ram, &[(0, 0, 50)])).unwrap(),
        "what was copied earlier is forgotten"
    );
    staging.stage(&pages(&ram, &[(0, 0, 1), (1, 0, 6)])).unwrap();
    assert!(!staging.stage_ahead(&pages(&ram, &[(0, 0, 41)])).unwrap());
    assert!(staging.stage_ahead(&pages(&ram, &[(0, 0, 40)])).unwrap());
    staging.send_next().unwrap();
    staging.clear();
    assert_eq!(staging.drop_ahead(), 40);
    assert!(staging.has_room(&pages(&ram, &[(0, 0, 64), (1, 0, 32)])));
}
