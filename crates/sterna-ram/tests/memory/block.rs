//! Blocks of guest RAM: access, populating, absence, zeroing.

use crate::mapped::Reserve;
use crate::support::skipped;
use sterna_ram::{Backing, Emptied, GuestRam, PAGE_SIZE, PageBitmap, RamBlock, RamError};

const PAGE: u64 = PAGE_SIZE as u64;
const SMALL: [Backing; 2] = [Backing::Memfd, Backing::Anonymous];

fn absent_pages(block: &RamBlock) -> Vec<u64> {
    let absent = PageBitmap::new(block.pages());
    block.mark_absent(0, block.pages(), &absent).unwrap();
    (0..block.pages()).filter(|page| absent.get(*page)).collect()
}

#[test]
fn block_bytes_written_are_read_back() {
    for backing in SMALL {
        let block = RamBlock::new("ram", 8 * PAGE, backing).unwrap();
        let bytes: Vec<u8> = (0..10_000u32).map(|i| (i % 251) as u8).collect();
        for (offset, len) in [(0, 1), (3, 7), (4090, 20), (1, 10_000), (8 * PAGE - 9, 9)] {
            block.write(offset, &bytes[..len]).unwrap();
            let mut back = vec![0; len];
            block.read(offset, &mut back).unwrap();
            assert_eq!(back, bytes[..len], "{backing:?} {offset} {len}");
        }
        block.write_u64(8, 0x0102_0304_0506_0708).unwrap();
        assert_eq!(block.read_u64(8).unwrap(), 0x0102_0304_0506_0708);
    }
}

#[test]
fn block_access_outside_is_refused() {
    let block = RamBlock::new("ram", 2 * PAGE, Backing::Memfd).unwrap();

    let refused = |result: Result<(), RamError>| matches!(result, Err(RamError::OutOfRange { .. }));
    assert!(refused(block.read(2 * PAGE - 1, &mut [0; 2])));
    assert!(refused(block.write(u64::MAX, &[0])));
    assert!(refused(block.slice(2 * PAGE, 1).map(|_| ())));
    assert!(block.slice(2 * PAGE, 0).is_ok());
    assert!(refused(block.zero_pages(1, 2)));
    assert!(refused(block.populate(u64::MAX, 1)));
    assert!(refused(block.populate(1, u64::MAX)));
    assert!(refused(block.mark_absent(2, 1, &PageBitmap::new(2))));
    assert!(matches!(block.read_u64(2 * PAGE - 7), Err(RamError::OutOfRange { .. })));
    assert!(matches!(block.read_u64(4), Err(RamError::Misaligned { .. })));
    assert!(matches!(block.mark_absent(0, 1, &PageBitmap::new(3)), Err(RamError::BitmapSize { .. })));
}

#[test]
fn block_bad_name_or_length_is_refused() {
    let new = |name: &str, len| RamBlock::new(name, len, Backing::Anonymous).map(|_| ());
    assert!(matches!(new("", PAGE), Err(RamError::Name { .. })));
    assert!(matches!(new(&"x".repeat(256), PAGE), Err(RamError::Name { .. })));
    assert!(new(&"x".repeat(255), PAGE).is_ok());
    for len in [0, 1, PAGE + 1, u64::MAX, u64::MAX - PAGE + 1] {
        assert!(matches!(new("a", len), Err(RamError::Length { .. })), "{len}");
    }
    assert!(matches!(RamBlock::new("h", PAGE, Backing::Huge2M), Err(RamError::Length { .. })));
}

#[test]
fn guest_duplicate_names_are_refused() {
    let block = |name: &str| RamBlock::new(name, PAGE, Backing::Anonymous).unwrap();
    assert!(matches!(
        GuestRam::new(vec![block("a"), block("b"), block("a")]),
        Err(RamError::DuplicateName { name }) if name == "a"
    ));
    let ram = GuestRam::new(vec![block("a"), block("b")]).unwrap();
    assert_eq!((ram.index_of("b"), ram.index_of("c"), ram.total_bytes()), (Some(1), None, 2 * PAGE));
}

#[test]
fn block_is_aligned_for_huge_pages() {
    for backing in SMALL {
        let block = RamBlock::new("ram", 3 * PAGE, backing).unwrap();
        assert_eq!(block.host_address() as usize % (2 << 20), 0);
    }
}

#[test]
fn block_that_exceeds_the_machine_stays_sparse() {
    for backing in SMALL {
        let block = RamBlock::new("ram", 64 << 30, backing).unwrap();
        block.write(63 << 30, b"x").unwrap();
        let absent = PageBitmap::new(block.pages());
        block.mark_absent(0, block.pages(), &absent).unwrap();
        let there = block.pages() - absent.count();
        assert!((1..=512).contains(&there), "{backing:?}: {there} pages");
        assert!(!absent.get((63 << 30) / PAGE));
        assert!(block.resident_bytes().unwrap() <= 2 << 20);
    }
}

#[test]
fn absent_random_pages_are_told_apart_without_being_touched() {
    let mut random = sterna_testing::random("absent_random_pages");
    for backing in SMALL {
        let block = RamBlock::new("ram", 4096 * PAGE, backing).unwrap();
        block.advise_huge_pages(false).unwrap();
        let mut written: Vec<u64> = (0..1500).map(|_| random.u64(..4096)).collect();
        written.sort_unstable();
        written.dedup();
        for page in &written {
            block.write(page * PAGE + random.u64(..PAGE), &[7]).unwrap();
        }
        let expected: Vec<u64> = (0..4096).filter(|page| written.binary_search(page).is_err()).collect();

        assert_eq!(absent_pages(&block), expected, "{backing:?}");
        // The first call has not changed the result.
        assert_eq!(absent_pages(&block), expected, "{backing:?}");
        assert_eq!(block.resident_bytes().unwrap(), written.len() as u64 * PAGE);

        let part = PageBitmap::new(4096);
        let (first, count) = (random.u64(..2000), random.u64(..2000));
        block.mark_absent(first, count, &part).unwrap();
        let inside = expected.iter().filter(|page| (first..first + count).contains(page)).count();
        assert_eq!(part.count(), inside as u64);
    }
}

#[test]
fn absent_page_that_was_read_is_no_data_in_anonymous_memory() {
    let block = RamBlock::new("ram", 16 * PAGE, Backing::Anonymous).unwrap();
    block.advise_huge_pages(false).unwrap();
    block.read(5 * PAGE, &mut [0; 8]).unwrap();
    assert_eq!(block.resident_bytes().unwrap(), 0);
}

#[test]
fn zero_pages_short_and_long_ranges_read_as_zero() {
    for backing in SMALL {
        for (first, count) in [(0, 1), (3, 200), (100, 900), (0, 1024), (7, 0)] {
            let block = RamBlock::new("ram", 1024 * PAGE, backing).unwrap();
            block.advise_huge_pages(false).unwrap();
            for page in 0..1024 {
                if page % 3 != 0 {
                    block.write(page * PAGE + page, &[1 + (page % 255) as u8]).unwrap();
                }
            }
            let before = absent_pages(&block);

            block.zero_pages(first, count).unwrap();

            let after = absent_pages(&block);
            assert!(before.iter().all(|page| after.contains(page)), "nothing was populated");
            for page in 0..1024 {
                let inside = (first..first + count).contains(&page);
                let zero = block.page(page).unwrap().is_zero().unwrap();
                assert_eq!(zero, inside || page % 3 == 0, "{backing:?} {first}+{count}: page {page}");
            }
            if count >= 256 {
                assert!(after.len() as u64 >= count, "memory was given back");
            }
        }
    }
}

#[test]
fn populate_makes_pages_resident_and_keeps_bytes() {
    for backing in SMALL {
        let block = RamBlock::new("ram", 512 * PAGE, backing).unwrap();
        block.advise_huge_pages(false).unwrap();
        block.write(12 * PAGE, b"kept").unwrap();

        block.populate(10, 20).unwrap();

        assert_eq!(block.resident_bytes().unwrap(), 20 * PAGE);
        let mut back = [0; 4];
        block.read(12 * PAGE, &mut back).unwrap();
        assert_eq!(&back, b"kept");
        assert!(block.page(11).unwrap().is_zero().unwrap());
        block.discard_all().unwrap();
        assert_eq!(block.resident_bytes().unwrap(), 0);
        assert!(block.page(12).unwrap().is_zero().unwrap());
    }
}

#[test]
fn block_on_huge_pages_works_as_the_others() {
    let reserve = Reserve::more(4, 2 << 20);
    huge_block();
    drop(reserve);
}

fn huge_block() {
    let block = match RamBlock::new("huge", 8 << 20, Backing::Huge2M) {
        Ok(block) => block,
        Err(error) => return skipped("block_on_huge_pages_works_as_the_others", error),
    };
    block.write((2 << 20) + 5, b"huge").unwrap();
    block.write(7 << 20, b"also").unwrap();

    let absent = absent_pages(&block);
    assert_eq!(absent.len(), 1024, "two of four huge pages");
    assert!(absent.contains(&0) && !absent.contains(&512) && !absent.contains(&1536));
    assert_eq!(block.resident_bytes().unwrap(), 4 << 20);

    block.zero_pages(500, 1000).unwrap();
    assert_eq!(absent_pages(&block).len(), 1536, "one huge page was given back");
    assert!((0..1500).all(|page| absent.contains(&page) || block.page(page).unwrap().is_zero().unwrap()));
    block.populate(0, 1).unwrap();
    assert!(!absent_pages(&block).contains(&511));
    block.discard_all().unwrap();
    assert_eq!(block.resident_bytes().unwrap(), 0);
}

#[test]
fn block_dropped_leaves_no_descriptor_and_no_mapping() {
    let name = format!("gone-{}", std::process::id());
    let seen = || std::fs::read_to_string("/proc/self/maps").unwrap().contains(&name);
    let block = RamBlock::new(name.clone(), 4 * PAGE, Backing::Memfd).unwrap();
    assert!(seen());
    drop(block);
    assert!(!seen());
}

/// Forbids this thread to give memory back by `fallocate` or `madvise`, like a sandbox.
fn forbid_discards() -> std::io::Result<()> {
    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
    const REFUSE: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let load = |offset| libc::sock_filter { code: 0x20, jt: 0, jf: 0, k: offset };
    let equal =
        |value: u32, then, otherwise| libc::sock_filter { code: 0x15, jt: then, jf: otherwise, k: value };
    let answer = |value| libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: value };
    // Offsets in `seccomp_data`: the number of the system call at 0, its third argument at 32.
    let mut filter = [
        load(0),
        equal(libc::SYS_fallocate as u32, 5, 0),
        equal(libc::SYS_madvise as u32, 0, 3),
        load(32),
        equal(libc::MADV_DONTNEED as u32, 2, 0),
        equal(libc::MADV_DONTNEED_LOCKED as u32, 1, 0),
        answer(ALLOW),
        answer(REFUSE),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the first call gets only numbers; the second gets a program that outlives the call, which copies
    // it.
    let refused = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
            || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) != 0
    };
    if refused { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

#[test]
fn block_whose_memory_cannot_be_given_back_is_made_zero_all_the_same() {
    let checked = std::thread::spawn(|| {
        let blocks = SMALL.map(|backing| RamBlock::new("ram", 1024 * PAGE, backing).unwrap());
        if let Err(error) = forbid_discards() {
            return skipped("block_whose_memory_cannot_be_given_back_is_made_zero_all_the_same", error);
        }
        for block in blocks {
            let fill = || (0..1024).for_each(|page| block.write(page * PAGE, &[7; 4096]).unwrap());
            let is_zero = |page: u64| block.page(page).unwrap().is_zero().unwrap();
            fill();
            assert!(block.discard_all().is_err(), "{:?}", block.is_shared());

            block.zero_pages(10, 900).unwrap();
            assert!(
                (0..1024).all(|page| is_zero(page) == (10..910).contains(&page)),
                "{:?}",
                block.is_shared()
            );

            fill();
            assert!(matches!(block.empty(), Ok(Emptied::Zeroed(_))));
            assert!((0..1024).all(is_zero), "{:?}", block.is_shared());
        }
    });
    checked.join().unwrap();
}

#[test]
fn block_of_a_file_on_huge_pages_is_the_file() {
    let Ok(owner) = RamBlock::new("m0", 2 << 20, Backing::Huge2M) else {
        return skipped("block_of_a_file_on_huge_pages_is_the_file", "no huge page is free");
    };
    let shared = owner.shared_file().unwrap();

    let block = RamBlock::of_file("m0", 2 << 20, shared.file.try_clone().unwrap()).unwrap();
    block.write(5 * PAGE_SIZE as u64, &[7; 100]).unwrap();

    assert_eq!((block.page_bytes(), block.is_shared()), (2 << 20, true));
    assert_eq!(owner.read_u64(5 * PAGE_SIZE as u64).unwrap(), u64::from_ne_bytes([7; 8]));
    block.zero_present_pages(0, 512).unwrap();
    assert_eq!(owner.read_u64(5 * PAGE_SIZE as u64).unwrap(), 0);
    let part = RamBlock::of_file("m0", 1 << 20, shared.file.try_clone().unwrap()).unwrap_err();
    assert!(matches!(part, RamError::Length { unit_bytes: 0x20_0000, .. }), "{part}");
}

#[test]
fn block_of_a_file_is_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ram");
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(1 << 20).unwrap();

    let block = RamBlock::of_file("m0", 1 << 20, file.try_clone().unwrap()).unwrap();
    block.write(5 * PAGE_SIZE as u64, &[7; 100]).unwrap();

    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(bytes.iter().position(|byte| *byte == 7), Some(5 * PAGE_SIZE));
    assert!(block.is_shared());
    block.zero_present_pages(0, 256).unwrap();
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 0));
    let short = RamBlock::of_file("m0", 2 << 20, file).expect_err("too short");
    assert!(short.to_string().contains("shorter"), "{short}");
    let pipe = std::fs::File::from(std::os::fd::OwnedFd::from(std::io::pipe().unwrap().0));
    assert!(RamBlock::of_file("m0", 1 << 20, pipe).is_err());
}
