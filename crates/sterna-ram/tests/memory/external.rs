//! Tests of blocks over memory that the VMM mapped.

use std::fs::File;
use std::sync::Arc;

use sterna_ram::{
    DirtyError, DirtySource, ExternalMemory, GuestRam, MemoryPermissions, PageBitmap, RamBlock, RamError,
    dirty,
};

use crate::mapped::{ANONYMOUS, Mapped, Reserve, memfd};
use crate::support::skipped;

const PAGE: u64 = 4096;
const NOTHING: MemoryPermissions = MemoryPermissions::none();

fn absent(block: &RamBlock) -> PageBitmap {
    let absent = PageBitmap::new(block.pages());
    block.mark_absent(0, block.pages(), &absent).unwrap();
    absent
}

fn is_zero(block: &RamBlock, page: u64) -> bool {
    block.page(page).unwrap().is_zero().unwrap()
}

fn maps() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().map(str::to_owned).collect()
}

/// Returns the lines of /proc/self/maps that overlap this memory.
fn maps_of(memory: &Mapped) -> Vec<String> {
    let (start, end) = (memory.address() as u64, memory.address() as u64 + memory.len as u64);
    let overlaps = |line: &String| {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let number = |text| u64::from_str_radix(text, 16).unwrap();
        number(from) < end && number(to) > start
    };
    maps().into_iter().filter(overlaps).collect()
}

/// Returns every kind of memory without huge pages that a VMM maps, and whether absent pages are found exactly.
fn kinds(pages: u64) -> Vec<(&'static str, Arc<Mapped>, bool)> {
    let len = pages * PAGE;
    let file = || memfd(len + 64 * PAGE, 0).unwrap();
    let tmpfs = tempfile_in("/dev/shm", len + PAGE);
    let disk = tempfile_in(env!("CARGO_TARGET_TMPDIR"), len);
    let shared_anonymous = Mapped::new(len as usize, libc::MAP_SHARED | libc::MAP_ANONYMOUS, None).unwrap();
    vec![
        ("anonymous", Mapped::anonymous(len), true),
        ("memfd", Mapped::shared(&memfd(len, 0).unwrap(), 0, len), true),
        ("memfd with an offset", Mapped::shared(&file(), 64 * PAGE, len), true),
        ("private memfd with an offset", Mapped::private(&file(), 64 * PAGE, len), true),
        ("tmpfs file with an offset", Mapped::shared(&tmpfs, PAGE, len), true),
        ("file on a disk", Mapped::shared(&disk, 0, len), false),
        ("private file on a disk", Mapped::private(&disk, 0, len), false),
        ("shared without a file", shared_anonymous, false),
    ]
}

fn tempfile_in(directory: &str, len: u64) -> Arc<File> {
    let path = format!("{directory}/sterna-{}-{:?}", std::process::id(), std::thread::current().id());
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file.set_len(len).unwrap();
    Arc::new(file)
}

#[test]
fn absent_pages_of_the_vmms_memory_never_hold_bytes() {
    let mut random = sterna_testing::random("absent_pages_of_the_vmms_memory_never_hold_bytes");
    const PAGES: u64 = 700;
    for (name, memory, is_exact) in kinds(PAGES) {
        let block = memory.block("ram", NOTHING);
        let mut written: Vec<u64> = (0..200).map(|_| random.u64(..PAGES)).collect();
        written.sort_unstable();
        written.dedup();
        for page in &written {
            block.write(page * PAGE + random.u64(..PAGE), &[7]).unwrap();
        }

        let absent = absent(&block);

        assert!(written.iter().all(|page| !absent.get(*page)), "{name}");
        let expected = if is_exact { PAGES - written.len() as u64 } else { 0 };
        // The kernel may populate anonymous memory with transparent huge pages.
        let is_thp = name == "anonymous" && absent.count() < expected;
        assert!(absent.count() == expected || is_thp, "{name}: {} of {expected}", absent.count());
        let resident = (PAGES - absent.count()) * PAGE;
        assert_eq!(block.resident_bytes().unwrap(), resident, "{name}: only the block's own bytes count");
    }
}

#[test]
fn private_mapping_of_a_file_with_bytes_is_not_absent() {
    let file = memfd(64 * PAGE, 0).unwrap();
    let writer = Mapped::shared(&file, 0, 64 * PAGE).block("writer", NOTHING);
    writer.write(40 * PAGE, b"in the file").unwrap();
    let private = Mapped::private(&file, 32 * PAGE, 32 * PAGE).block("ram", NOTHING);
    private.write(3 * PAGE, b"in the copy").unwrap();

    let absent = absent(&private);

    assert!(!absent.get(8) && !absent.get(3) && absent.get(0));
    assert_eq!(absent.count(), 30);
    assert!(is_zero(&writer, 35), "the copy is private");
}

#[test]
fn pages_that_another_mapping_wrote_are_not_absent() {
    for offset in [0, 16] {
        let file = memfd(64 * PAGE, 0).unwrap();
        let block = Mapped::shared(&file, offset * PAGE, 16 * PAGE).block("ram", NOTHING);
        let device = Mapped::shared(&file, 0, 64 * PAGE).block("device", NOTHING);
        device.write((offset + 5) * PAGE, b"dma").unwrap();
        assert!(!absent(&block).get(5) && absent(&block).count() == 15);
    }
    let shared = Mapped::new(16 << 12, libc::MAP_SHARED | libc::MAP_ANONYMOUS, None).unwrap();
    assert_eq!(absent(&shared.block("ram", NOTHING)).count(), 0, "a child may have written it");
}

#[test]
fn blocks_of_one_file_are_full_apart() {
    let file = memfd(96 * PAGE, 0).unwrap();
    let [low, high] =
        [0, 64].map(|first| Mapped::shared(&file, first * PAGE, 32 * PAGE).block("ram", NOTHING));
    low.populate(0, 32).unwrap();

    assert!(low.is_fully_populated() && !high.is_fully_populated());
    assert_eq!((low.resident_bytes().unwrap(), high.resident_bytes().unwrap()), (32 * PAGE, 0));
    assert_eq!((absent(&low).count(), absent(&high).count()), (0, 32));
    assert_eq!(high.shared_file().unwrap().offset, 64 * PAGE);
    let private = Mapped::private(&file, 0, 32 * PAGE).block("ram", NOTHING);
    assert!(private.shared_file().is_none(), "nobody else can have the copy");
}

#[test]
fn memory_that_must_not_be_given_back_is_zeroed_where_it_is() {
    let pages = 1024;
    for (name, memory, _) in kinds(pages) {
        memory.populate();
        let Some(before) = memory.physical_pages() else {
            return skipped(
                "memory_that_must_not_be_given_back_is_zeroed_where_it_is",
                "physical pages are hidden",
            );
        };
        let block = memory.block("ram", NOTHING);
        let (mapped, fill) =
            (maps_of(&memory), || (0..pages).for_each(|page| block.write(page * PAGE, &[9]).unwrap()));

        fill();
        block.zero_pages(3, 600).unwrap();
        block.zero_present_pages(700, 300).unwrap();
        assert!(
            (0..pages).all(
                |page| is_zero(&block, page) == ((3..603).contains(&page) || (700..1000).contains(&page))
            )
        );
        assert!(matches!(block.discard_all(), Err(RamError::NotPermitted { .. })), "{name}");
        assert!(!is_zero(&block, 0), "nothing has changed");
        fill();
        block.empty().unwrap();

        assert!((0..pages).all(|page| is_zero(&block, page)), "{name}");
        // A page of a private file mapping that was only read is copied on the first write.
        if !name.starts_with("private") {
            assert!(memory.physical_pages().unwrap() == before, "{name}: a device would write other pages");
        }
        assert_eq!(maps_of(&memory), mapped, "{name}");
        assert!(matches!(block.advise_huge_pages(true), Err(RamError::NotPermitted { .. })));
    }
}

/// Shows that the test above would detect an engine that gives memory back without permission.
#[test]
fn memory_that_was_given_back_is_noticed() {
    let memory = Mapped::anonymous(1024 * PAGE);
    memory.populate();
    let Some(before) = memory.physical_pages() else {
        return skipped("memory_that_was_given_back_is_noticed", "physical pages are hidden");
    };
    let block = memory.block("ram", NOTHING.allow_discard());

    block.zero_pages(3, 600).unwrap();

    assert!(memory.physical_pages() != Some(before));
}

#[test]
fn memory_that_may_be_given_back_is() {
    for (name, memory, _) in kinds(1024) {
        let block = memory.try_block("ram", |memory| memory.permit(NOTHING.allow_discard()));
        if name.starts_with("private ") {
            assert!(matches!(block, Err(RamError::External { .. })), "{name}: it would read as the file");
            continue;
        }
        let block = block.unwrap();
        memory.populate();
        block.write(500 * PAGE, &[1]).unwrap();
        block.zero_pages(0, 1000).unwrap();
        assert!(is_zero(&block, 500), "{name}");
        block.write(500 * PAGE, &[1]).unwrap();
        block.discard_all().unwrap();
        assert!(is_zero(&block, 500), "{name}");
    }
}

#[test]
fn owner_lives_as_long_as_the_last_clone_of_the_block() {
    let memory = Mapped::anonymous(4 * PAGE);
    let owner = Arc::downgrade(&memory);
    let block = memory.block("ram", NOTHING);
    let clone = block.clone();
    drop((memory, block));
    clone.write(0, &[1]).unwrap();
    assert!(owner.upgrade().is_some());
    drop(clone);
    assert!(owner.upgrade().is_none());
}

#[test]
fn read_only_memory_is_read_and_never_written() {
    let file = memfd(4 * PAGE, 0).unwrap();
    let writable = Mapped::shared(&file, 0, 4 * PAGE).block("ram", NOTHING);
    writable.write(PAGE, b"firmware").unwrap();
    let rom = Mapped::protected(4 << 12, libc::PROT_READ, libc::MAP_SHARED, Some((file, 0))).unwrap();
    let block = rom.try_block("rom", ExternalMemory::read_only).unwrap();

    let mut bytes = [0; 8];
    block.read(PAGE, &mut bytes).unwrap();
    assert_eq!(&bytes, b"firmware");
    let refused = |result: Result<(), RamError>| matches!(result, Err(RamError::ReadOnly { .. }));
    assert!(refused(block.write(0, &[1])) && refused(block.write_u64(0, 1)));
    assert!(
        refused(block.zero_pages(0, 4))
            && refused(block.populate(0, 4))
            && refused(block.empty().map(|_| ()))
    );
    assert!(!absent(&block).get(1) && absent(&block).get(0));
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let file = memfd(8 * PAGE, 0).unwrap();
    let memory = Mapped::shared(&file, 0, 8 * PAGE);
    let refused = |more: &dyn Fn(ExternalMemory) -> ExternalMemory| {
        let block = memory.try_block("ram", more);
        assert!(matches!(block, Err(RamError::External { .. })), "{block:?}");
    };
    refused(&|memory| memory.file(file.clone(), PAGE));
    refused(&|memory| memory.file(file.clone(), 7));
    refused(&|memory| memory.huge_pages(3 << 12));
    refused(&|memory| memory.read_only().permit(NOTHING.allow_discard()));
    let owner = || Arc::new(()) as Arc<_>;
    let at = |address: usize, len| {
        let memory = ExternalMemory::new(address as *mut u8, len, owner());
        // SAFETY: the call is refused before it accesses memory.
        unsafe { RamBlock::from_external("ram", memory) }.unwrap_err()
    };
    let address = memory.address() as usize;
    assert!(matches!(at(0, PAGE), RamError::External { .. }));
    assert!(matches!(at(address + 1, PAGE), RamError::External { .. }));
    assert!(matches!(at(usize::MAX & !4095, PAGE), RamError::External { .. }));
    assert!(matches!(at(address, 0), RamError::Length { .. }));
    assert!(matches!(at(address, 4097), RamError::Length { .. }));
}

#[test]
fn userfaultfd_needs_leave() {
    let memory = Mapped::anonymous(4 * PAGE);
    let source = |permissions| {
        dirty::UffdDirtyLog::new(GuestRam::new(vec![memory.block("ram", permissions)]).unwrap()).start()
    };
    match source(NOTHING.allow_discard()) {
        Err(DirtyError::NotPermitted { block, .. }) => assert_eq!(block, "ram"),
        other => panic!("{other:?}"),
    }
    match source(NOTHING.allow_userfaultfd()) {
        Err(error @ DirtyError::Unsupported { .. }) => skipped("userfaultfd_needs_leave", error),
        started => started.unwrap(),
    }
}

#[test]
fn userfaultfd_tracks_every_kind_that_the_kernel_can() {
    for (name, memory, _) in kinds(600) {
        let ram = GuestRam::new(vec![memory.block("ram", NOTHING.allow_userfaultfd())]).unwrap();
        let log = dirty::UffdDirtyLog::new(ram.clone());
        ram.block(0).write(7 * PAGE, &[1]).unwrap();
        match log.start() {
            Ok(()) => {}
            // The kernel cannot track files on disks.
            Err(DirtyError::System { .. }) if name.contains("disk") => continue,
            Err(error) => {
                skipped("userfaultfd_tracks_every_kind_that_the_kernel_can", format!("{name}: {error}"));
                continue;
            }
        }
        let mut dirty = sterna_ram::DirtyBitmaps::new(&ram);
        ram.block(0).write(5 * PAGE, &[1]).unwrap();
        log.sync(&mut dirty).unwrap();
        assert!(dirty.block(0).get(5) && !dirty.block(0).get(7), "{name}");
        assert!(!absent(ram.block(0)).get(5) && !absent(ram.block(0)).get(7), "{name}");
        ram.block(0).write(7 * PAGE, &[2]).unwrap();
        dirty.clear_all();
        log.sync(&mut dirty).unwrap();
        assert!(dirty.block(0).get(7) && !dirty.block(0).get(5), "{name}");
        log.stop().unwrap();
    }
}

#[test]
fn fresh_is_true_until_a_guest_was_there() {
    let ram = || GuestRam::new(vec![Mapped::anonymous(PAGE).block("ram", NOTHING)]).unwrap();
    let declared = || {
        let ram = ram();
        ram.block(0).declare_fresh();
        ram
    };
    assert!(!ram().block(0).take_fresh(), "nobody has said so");
    let used = declared();
    assert!(used.block(0).take_fresh() && !used.block(0).take_fresh(), "for one migration");
    let left = declared();
    drop(left.claim_custody(sterna_ram::Custody::Leaving { is_free: true }, |_| true));
    assert!(!left.block(0).take_fresh(), "a guest was there to leave");
    let booted = declared();
    booted.has_new_guest().unwrap();
    assert!(!booted.block(0).take_fresh());
    let arriving = declared();
    let _claim = arriving.claim_custody(sterna_ram::Custody::Arriving { is_free: false }, |_| true);
    assert!(arriving.block(0).take_fresh());
}

const HUGE: u64 = 2 << 20;

#[test]
fn part_of_a_hugetlbfs_file_is_zeroed_inside_its_bounds() {
    let _reserve = Reserve::more(6, HUGE);
    let mapped = memfd(6 * HUGE, libc::MFD_HUGETLB | libc::MFD_HUGE_2MB)
        .and_then(|file| Mapped::new(5 << 21, libc::MAP_SHARED, Some((file, HUGE))));
    let whole = match mapped {
        Ok(whole) => whole,
        Err(error) => return skipped("part_of_a_hugetlbfs_file_is_zeroed_inside_its_bounds", error),
    };
    // From the middle of the first huge page to the middle of the last one.
    let (file, _) = whole.file.clone().unwrap();
    let len = 4 * HUGE;
    for permissions in [NOTHING, NOTHING.allow_discard()] {
        let memory = ExternalMemory::new(whole.address().wrapping_add(1 << 20), len, whole.clone());
        let memory = memory.shared().file(file.clone(), HUGE + (1 << 20)).permit(permissions);
        // SAFETY: inside of the mapping that `whole` keeps.
        let block = unsafe { RamBlock::from_external("ram", memory) }.unwrap();
        assert_eq!(block.page_bytes(), HUGE);
        let around = whole.block("around", NOTHING);
        (0..5 * HUGE / PAGE).for_each(|page| around.write(page * PAGE, &[3]).unwrap());
        let held = file_bytes(&file);

        block.empty().unwrap();

        // Must precede the reads below, because reading a page populates it again.
        assert_eq!(held - file_bytes(&file), if permissions.discard { 3 * HUGE } else { 0 });
        assert!((0..block.pages()).all(|page| is_zero(&block, page)));
        let outside = (0..256).chain(256 + block.pages()..around.pages());
        assert!(outside.clone().count() == 512 && outside.clone().all(|page| !is_zero(&around, page)));
        assert_eq!(absent(&block).count(), 0, "what the file's other parts hold is unknown");
    }
}

fn file_bytes(file: &File) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512
}

#[test]
fn anonymous_huge_pages_are_asked_for_and_kept() {
    for (bytes, flag) in [(HUGE, libc::MAP_HUGE_2MB), (1 << 30, libc::MAP_HUGE_1GB)] {
        let _reserve = Reserve::more(2, bytes);
        let memory = match Mapped::new(2 * bytes as usize, ANONYMOUS | libc::MAP_HUGETLB | flag, None) {
            Ok(memory) => memory,
            Err(error) => {
                skipped("anonymous_huge_pages_are_asked_for_and_kept", format!("{bytes}: {error}"));
                continue;
            }
        };
        let block = |permissions| {
            memory.try_block("ram", |memory| memory.huge_pages(bytes).permit(permissions)).unwrap()
        };
        let pinned = block(NOTHING);
        pinned.write(bytes + 5, &[1]).unwrap();
        assert_eq!(absent(&pinned).count(), bytes / PAGE);
        pinned.zero_pages(0, pinned.pages()).unwrap();
        assert!(
            is_zero(&pinned, bytes / PAGE) && absent(&pinned).count() == bytes / PAGE,
            "it is still there"
        );
        block(NOTHING.allow_discard()).discard_all().unwrap();
        assert_eq!(absent(&pinned).count(), 2 * bytes / PAGE);
    }
}

#[test]
fn transparent_huge_pages_of_the_vmm_stay_whole() {
    let memory = Mapped::anonymous(8 * HUGE + 3 * PAGE);
    // SAFETY: our own mapping; the advice changes no byte.
    unsafe { libc::madvise(memory.address().cast(), memory.len, libc::MADV_HUGEPAGE) };
    memory.populate();
    let Some(before) = memory.physical_pages() else {
        return skipped("transparent_huge_pages_of_the_vmm_stay_whole", "physical pages are hidden");
    };
    let block = memory.block("ram", NOTHING);
    (0..block.pages()).for_each(|page| block.write(page * PAGE + 8, &[3]).unwrap());
    block.zero_pages(1, block.pages() - 2).unwrap();
    assert!(!is_zero(&block, 0) && (1..block.pages() - 1).all(|page| is_zero(&block, page)));
    assert!(memory.physical_pages() == Some(before));
}

#[test]
fn blocks_of_one_hugetlbfs_file_are_sparse_if_they_are_all_of_it() {
    let _reserve = Reserve::more(8, HUGE);
    let mapped = memfd(8 * HUGE, libc::MFD_HUGETLB | libc::MFD_HUGE_2MB).and_then(|file| {
        let map = |first, huge| {
            Mapped::new((huge * HUGE) as usize, libc::MAP_SHARED, Some((Arc::clone(&file), first * HUGE)))
        };
        Ok((map(4, 3)?, map(0, 3)?, map(3, 1)?, map(1, 3)?))
    });
    let (high, low, unknown, overlapping) = match mapped {
        Ok(all) => all,
        Err(error) => {
            return skipped("blocks_of_one_hugetlbfs_file_are_sparse_if_they_are_all_of_it", error);
        }
    };
    let both = || GuestRam::new(vec![high.block("high", NOTHING), low.block("low", NOTHING)]).unwrap();
    let ram = both();
    ram.block(0).write(HUGE, &[1]).unwrap();
    assert_eq!((absent(ram.block(0)).count(), absent(ram.block(1)).count()), (1024, 1536));
    assert!(!absent(ram.block(0)).get(512));

    unknown.block("elsewhere", NOTHING).write(0, &[1]).unwrap();
    assert_eq!(
        absent(ram.block(0)).count(),
        0,
        "the file holds a page of which the guest's blocks know nothing"
    );
    let twice = GuestRam::new(vec![low.block("low", NOTHING), overlapping.block("twice", NOTHING)]).unwrap();
    assert_eq!(absent(twice.block(0)).count(), 0, "a page would be counted twice");
    drop(ram);
    assert_eq!(absent(&low.block("low", NOTHING)).count(), 0, "alone it cannot be told");
}

#[test]
fn memory_that_is_filled_on_demand_has_no_absent_pages() {
    for (name, memory, _) in kinds(100) {
        let block = memory.try_block("ram", ExternalMemory::filled_on_demand).unwrap();
        assert_eq!(absent(&block).count(), 0, "{name}: touching a page brings its bytes");
    }
}
