//! Dirty logs that the VMM keeps itself, and guest memory of the `vm-memory` crate.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use sterna_ram::dirty::{
    AtomicBitmapLog, Combined, ExternalLog, FoundPages, Replaceable, SoftwareLog, VmmLog,
};
use sterna_ram::{
    Backing, DirtyBitmaps, DirtyError, DirtySource, GuestRam, MemoryPermissions, RamBlock, RamError,
    RegionPlan,
};
use vm_memory::bitmap::AtomicBitmap;
use vm_memory::mmap::{MmapRegion, MmapRegionBuilder};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

use crate::mapped::memfd;

const PAGE: u64 = 4096;

fn found(ram: &GuestRam, source: &dyn DirtySource) -> Vec<(usize, u64)> {
    let mut dirty = DirtyBitmaps::new(ram);
    let report = source.sync(&mut dirty).unwrap();
    assert_eq!(report.newly_dirty, dirty.count());
    let of = |(block, bits): (usize, &sterna_ram::PageBitmap)| {
        (0..bits.pages()).filter(|page| bits.get(*page)).map(move |page| (block, page)).collect::<Vec<_>>()
    };
    dirty.blocks().iter().enumerate().flat_map(of).collect()
}

#[test]
fn regions_of_one_file_with_a_hole_become_blocks() {
    let file = memfd(96 * PAGE, 0).unwrap();
    let part = |from: u64, pages: u64| (FileOffset::from_arc(Arc::clone(&file), from * PAGE), pages);
    let region = |at, (file, pages): (FileOffset, u64)| {
        GuestRegionMmap::<()>::from_range(GuestAddress(at), (pages * PAGE) as usize, Some(file)).unwrap()
    };
    let memory =
        GuestMemoryMmap::from_regions(vec![region(0, part(64, 20)), region(1 << 32, part(3, 33))]).unwrap();

    let ram = GuestRam::from_guest_memory(&memory, |index, region| {
        RegionPlan::named(format!("ram{index}@{:#x}", region.start_addr().0)).permit(if index == 0 {
            MemoryPermissions::none().allow_advise()
        } else {
            MemoryPermissions::none()
        })
    })
    .unwrap();

    let shape: Vec<_> =
        ram.blocks().iter().map(|b| (b.name(), b.pages(), b.guest_address().unwrap())).collect();
    assert_eq!(shape, [("ram0@0x0", 20, 0), ("ram1@0x100000000", 33, 1 << 32)]);
    assert_eq!(
        ram.blocks().iter().map(|b| b.shared_file().unwrap().offset / PAGE).collect::<Vec<_>>(),
        [64, 3]
    );
    assert_eq!(ram.blocks().iter().map(|b| b.permissions().advise).collect::<Vec<_>>(), [true, false]);
    // The same memory, not a copy, and still mapped without the VMM's handle.
    memory.write_obj(0x1122_u64, GuestAddress((1 << 32) + 8)).unwrap();
    drop(memory);
    assert_eq!(ram.block(1).read_u64(8).unwrap(), 0x1122);
    assert_eq!(ram.block(0).resident_bytes().unwrap(), 0);
}

#[test]
fn regions_of_every_protection_and_mapping_are_told_apart() {
    let region = |protection, flags| {
        let mapping = MmapRegionBuilder::<()>::new(4096).with_mmap_prot(protection).with_mmap_flags(flags);
        let region = GuestRegionMmap::new(mapping.build().unwrap(), GuestAddress(0)).unwrap();
        RamBlock::from_region(&region, "ram")
    };
    let (private, shared) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    let block = region(3, private).unwrap();
    assert!(!block.is_shared() && !block.is_read_only());
    assert!(region(3, shared).unwrap().is_shared() && region(1, shared).unwrap().is_read_only());
    assert!(matches!(region(0, private), Err(RamError::External { .. })));
    let mut page = vec![0_u8; 8192];
    let address = page.as_mut_ptr().wrapping_add(page.as_ptr().align_offset(4096));
    // SAFETY: the page lives to the end of the test.
    let foreign = unsafe { MmapRegion::<()>::build_raw(address, 4096, 3, private) }.unwrap();
    let foreign = GuestRegionMmap::new(foreign, GuestAddress(0)).unwrap();
    assert!(matches!(RamBlock::from_region(&foreign, "ram"), Err(RamError::External { .. })));
}

#[test]
fn writes_through_vm_memory_are_reported_once() {
    let ranges = [(GuestAddress(0), 100 << 12), (GuestAddress(1 << 32), 70 << 12)];
    let memory = GuestMemoryMmap::<AtomicBitmap>::from_ranges(&ranges).unwrap();
    let ram = GuestRam::from_guest_memory(&memory, |index, _| format!("ram{index}")).unwrap();
    let log = AtomicBitmapLog::new(&ram, &memory).unwrap();
    memory.write_obj(1_u8, GuestAddress(0)).unwrap();
    assert!(matches!(log.sync(&mut DirtyBitmaps::new(&ram)), Err(DirtyError::NotStarted { .. })));
    log.start().unwrap();

    memory.write_slice(&[1; 5000], GuestAddress(7 * PAGE + 4000)).unwrap();
    memory.write_obj(1_u64, GuestAddress((1 << 32) + 69 * PAGE)).unwrap();

    assert_eq!(found(&ram, &log), [(0, 7), (0, 8), (0, 9), (1, 69)], "and not what came before");
    assert!(found(&ram, &log).is_empty());
    let other = GuestMemoryMmap::<AtomicBitmap>::from_ranges(&ranges).unwrap();
    assert!(matches!(AtomicBitmapLog::new(&ram, &other), Err(DirtyError::Range { .. })));
    // Combined with the writes that the VMM reports itself.
    let software = Arc::new(SoftwareLog::new(&ram));
    log.stop().unwrap();
    let both = Combined::new(vec![Arc::new(log), Arc::clone(&software) as _]);
    both.start().unwrap();
    software.mark(0, 3);
    memory.write_obj(1_u8, GuestAddress(4 * PAGE)).unwrap();
    assert_eq!(found(&ram, &both), [(0, 3), (0, 4)]);
}

type Feed = Box<dyn FnOnce(&mut FoundPages<'_>) + Send>;

/// A log whose next reports are set by the test.
#[derive(Default)]
struct Fed {
    next: Mutex<Vec<Feed>>,
    logs: AtomicBool,
    fails: AtomicBool,
}

impl Fed {
    fn feed(&self, feed: impl FnOnce(&mut FoundPages<'_>) + Send + 'static) {
        self.next.lock().unwrap().push(Box::new(feed));
    }

    fn result(&self) -> io::Result<()> {
        if self.fails.load(Ordering::SeqCst) { Err(io::Error::other("told to fail")) } else { Ok(()) }
    }
}

impl VmmLog for Fed {
    fn start(&self) -> io::Result<()> {
        self.logs.store(true, Ordering::SeqCst);
        self.result()
    }
    fn stop(&self) -> io::Result<()> {
        self.logs.store(false, Ordering::SeqCst);
        Ok(())
    }
    fn read(&self, found: &mut FoundPages<'_>) -> io::Result<()> {
        self.next.lock().unwrap().drain(..).for_each(|feed| feed(found));
        self.result()
    }
}

fn two_blocks() -> GuestRam {
    let block = |name: &str, pages| RamBlock::new(name, pages * PAGE, Backing::Anonymous).unwrap();
    GuestRam::new(vec![block("a", 100), block("b", 70).at_guest_address(1 << 32)]).unwrap()
}

#[test]
fn vmm_that_reads_its_log_itself_feeds_the_engine() {
    let ram = two_blocks();
    let source = ExternalLog::new(&ram, Fed::default());
    assert!(matches!(source.sync(&mut DirtyBitmaps::new(&ram)), Err(DirtyError::NotStarted { .. })));
    source.start().unwrap();
    assert!(source.log().logs.load(Ordering::SeqCst));

    source.log().feed(|found| found.words(0, 30, &[0b1001, 1]));
    source.log().feed(|found| found.words_at((1 << 32) + 64 * PAGE, &[0b10_0000]));
    source.log().feed(|found| found.pages(0, 98, 2));
    assert_eq!(found(&ram, &source), [(0, 30), (0, 33), (0, 94), (0, 98), (0, 99), (1, 69)]);
    assert!(found(&ram, &source).is_empty());

    // One byte at the end of a page, and two bytes across the border of two others.
    source.log().feed(|found| found.pages_at((1 << 32) + 3 * PAGE - 1, 1));
    source.log().feed(|found| found.pages_at((1 << 32) + 8 * PAGE - 1, 2));
    source.log().feed(|found| found.pages_at((1 << 32) + 66 * PAGE, 4 * PAGE));
    source.log().feed(|found| found.pages_at(7, 0));
    assert_eq!(found(&ram, &source), [(1, 2), (1, 7), (1, 8), (1, 66), (1, 67), (1, 68), (1, 69)]);

    source.stop().unwrap();
    assert!(!source.log().logs.load(Ordering::SeqCst));
}

#[test]
fn page_that_the_ram_does_not_have_is_an_error_and_not_lost() {
    let ram = two_blocks();
    let source = ExternalLog::new(&ram, Fed::default());
    source.start().unwrap();
    let feeds: [fn(&mut FoundPages<'_>); 9] = [
        |found| found.words(0, 99, &[0b10]),
        |found| found.words(0, 36, &[0, 1 << 63]),
        |found| found.words(2, 0, &[1]),
        |found| found.words_at(5 << 12, &[1]),
        |found| found.words_at((1 << 32) + 70 * PAGE, &[1]),
        |found| found.pages(1, 70, 1),
        |found| found.pages_at((1 << 32) - 1, 1),
        |found| found.pages_at((1 << 32) + 69 * PAGE, PAGE + 1),
        |found| found.pages_at((1 << 32) + 1, u64::MAX),
    ];
    for feed in feeds {
        source.log().feed(feed);
        let mut dirty = DirtyBitmaps::new(&ram);
        assert!(matches!(source.sync(&mut dirty), Err(DirtyError::Range { .. })));
    }
    // KVM's words may have clear bits after the end.
    source.log().feed(|found| found.words(0, 99, &[1, 0]));
    assert_eq!(found(&ram, &source), [(0, 99)]);
    source.log().fails.store(true, Ordering::SeqCst);
    assert!(matches!(source.sync(&mut DirtyBitmaps::new(&ram)), Err(DirtyError::System { .. })));
}

#[test]
fn source_is_replaced_between_migrations_alone() {
    let before = two_blocks();
    let source = Replaceable::new(Arc::new(SoftwareLog::new(&before)));
    source.start().unwrap();
    let plugged = RamBlock::new("c", 5 * PAGE, Backing::Anonymous).unwrap();
    let now = before.with_blocks(before.blocks().iter().cloned().chain([plugged]).collect()).unwrap();
    let log = Arc::new(SoftwareLog::new(&now));
    assert!(matches!(source.replace(Arc::clone(&log) as _), Err(DirtyError::Running { .. })));
    source.stop().unwrap();
    source.replace(Arc::clone(&log) as _).unwrap();
    source.start().unwrap();
    log.mark(2, 4);
    assert_eq!(found(&now, &source), [(2, 4)]);
    assert!(source.sync(&mut DirtyBitmaps::new(&before)).is_err(), "the old memory is no more");
}
