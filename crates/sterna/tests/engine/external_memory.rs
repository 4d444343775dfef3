//! Migrations of guests whose memory belongs to their VMM. The engine never maps, unmaps, gives back or replaces a
//! page of such memory.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::MemfdFlags;
use sterna::error::{Difference, MachineDifference};
use sterna::ram::{
    Backing, ChangeError, Custody, DirtyError, GuestRam, MemoryPermissions, PAGE_SIZE, RamBlock, RegionPlan,
};
use sterna::{Arrival, Capabilities, Hook, MigrationError, Outcome, Status, VmError};
use sterna_guests::Fill;
use sterna_guests::process::{ProcessConfig, ProcessGuest, Tracking};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
};

use crate::common;
use crate::plain::{Plain, byte_of};
use crate::support::cause;

const MIB: u64 = 1 << 20;
/// Low memory, a hole, high memory, and a length that is no multiple of 2 MiB.
const REGIONS: [(u64, u64); 3] = [(0, 40 * MIB), (64 * MIB, 23 * MIB + 3 * 4096), (4 << 30, MIB)];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Anonymous,
    /// Parts of one memfd, with a gap before each part, mapped shared.
    Shared,
    /// The same parts, mapped privately.
    Private,
}

const KINDS: [Kind; 3] = [Kind::Anonymous, Kind::Shared, Kind::Private];

fn memfd(len: u64) -> Arc<File> {
    let fd: OwnedFd = rustix::fs::memfd_create("vmm", MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(fd);
    file.set_len(len).unwrap();
    Arc::new(file)
}

fn region(
    at: u64,
    len: u64,
    protection: i32,
    flags: i32,
    file: Option<(&Arc<File>, u64)>,
) -> GuestRegionMmap {
    let mut builder = MmapRegionBuilder::new(len as usize).with_mmap_prot(protection).with_mmap_flags(flags);
    if let Some((file, offset)) = file {
        builder = builder.with_file_offset(FileOffset::from_arc(Arc::clone(file), offset));
    }
    GuestRegionMmap::new(builder.build().unwrap(), GuestAddress(at)).unwrap()
}

const READ_WRITE: i32 = 3;
const MAP_SHARED: i32 = 1;
const MAP_PRIVATE: i32 = 2;
const MAP_ANONYMOUS: i32 = 0x20;

/// Guest memory, allocated as VMMs do it.
fn memory(kind: Kind) -> GuestMemoryMmap {
    let file = memfd(128 * MIB);
    let mut offset = 0;
    let regions = REGIONS.map(|(at, len)| {
        offset += MIB;
        let from = offset;
        offset += len.next_multiple_of(MIB);
        match kind {
            Kind::Anonymous => region(at, len, READ_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, None),
            Kind::Shared => region(at, len, READ_WRITE, MAP_SHARED, Some((&file, from))),
            Kind::Private => region(at, len, READ_WRITE, MAP_PRIVATE, Some((&file, from))),
        }
    });
    GuestMemoryMmap::from_regions(regions.into()).unwrap()
}

/// The engine's view of the memory, with only the given permissions.
fn ram(memory: &GuestMemoryMmap, permissions: MemoryPermissions) -> GuestRam {
    let plan = |index, _: &GuestRegionMmap| RegionPlan::named(format!("ram{index}")).permit(permissions);
    GuestRam::from_guest_memory(memory, plan).unwrap()
}

/// Lines of /proc/self/maps for the guest's memory. If a line covers other memory, too, that part is omitted.
fn maps(memory: &GuestMemoryMmap) -> Vec<(u64, u64, String)> {
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    let number = |text| u64::from_str_radix(text, 16).unwrap();
    let mut found = Vec::new();
    for region in memory.iter() {
        let (start, end) = (region.as_ptr() as u64, region.as_ptr() as u64 + region.len());
        for line in text.lines() {
            let mut fields = line.split_whitespace();
            let (from, to) = fields.next().unwrap().split_once('-').unwrap();
            let (from, to) = (number(from).max(start), number(to).min(end));
            if from < to {
                // The offset is omitted, because it belongs to the line's start.
                let (access, device_and_inode) = (fields.next().unwrap(), fields.skip(1).take(2));
                found.push((from, to, format!("{access} {}", device_and_inode.collect::<String>())));
            }
        }
    }
    assert!(found.len() >= REGIONS.len().min(memory.num_regions()));
    found
}

/// Physical pages of a guest's memory, 0 for absent pages. `None` without the privilege to read them.
fn physical_pages(memory: &GuestMemoryMmap) -> Option<Vec<u64>> {
    let pagemap = File::open("/proc/self/pagemap").ok()?;
    let mut pages = Vec::new();
    for region in memory.iter() {
        let mut bytes = vec![0; region.len() as usize / PAGE_SIZE * 8];
        pagemap.read_exact_at(&mut bytes, region.as_ptr() as u64 / PAGE_SIZE as u64 * 8).ok()?;
        let entries = bytes.chunks_exact(8).map(|entry| u64::from_le_bytes(entry.try_into().unwrap()));
        pages.extend(entries.map(|entry| (entry & ((1 << 55) - 1)) * (entry >> 63)));
    }
    pages.iter().any(|page| *page != 0).then_some(pages)
}

/// Writes every page, like a VMM that pins the pages for a device.
fn pin(ram: &GuestRam, byte: u8) {
    for block in ram.blocks() {
        (0..block.pages()).for_each(|page| block.write(page * PAGE_SIZE as u64, &[byte]).unwrap());
    }
}

#[allow(clippy::print_stderr, reason = "says that a test was skipped")]
fn skipped(why: &str) {
    eprintln!("{why}");
}

fn config() -> ProcessConfig {
    ProcessConfig { working_set_pages: Some(512), ..common::config() }
}

/// `fill`: zero pages in long runs, or scattered.
fn boot(memory: &GuestMemoryMmap, fill: Fill) -> Arc<ProcessGuest> {
    common::trace();
    let config = ProcessConfig { fill, ..config() };
    let guest = ProcessGuest::boot_in(config, ram(memory, MemoryPermissions::none())).unwrap();
    guest.cont().unwrap();
    guest
}

fn waiting(ram: GuestRam) -> Arc<ProcessGuest> {
    ProcessGuest::waiting_in(config(), ram).unwrap()
}

fn is_all_zero(ram: &GuestRam) -> bool {
    let is_zero =
        |block: &RamBlock| (0..block.pages()).all(|page| block.page(page).unwrap().is_zero().unwrap());
    ram.blocks().iter().all(is_zero)
}

#[test]
fn guest_moves_from_memory_of_one_vmm_to_that_of_another_and_no_page_is_replaced() {
    let ways = |kind| [(kind, 0, Fill::Zero), (kind, 2, Fill::Zero), (kind, 2, Fill::Half(7))];
    for (kind, lanes, fill) in KINDS.into_iter().flat_map(ways) {
        let (from, to) = (memory(kind), memory(kind));
        let (source, target) = (boot(&from, fill), waiting(ram(&to, MemoryPermissions::none())));
        // Content of an earlier guest, in pages that a device knows by address.
        pin(&ram(&to, MemoryPermissions::none()), 0xee);
        let (maps_before, pages_before) = ((maps(&from), maps(&to)), physical_pages(&to));
        let (params, mut capabilities) = common::multifd(lanes.max(1));
        capabilities.multifd = lanes > 0;

        let (migration, outcome, arrival) = common::migrate(&source, &target, &params, capabilities);

        assert_eq!((maps(&from), maps(&to)), maps_before, "{kind:?}");
        assert!(physical_pages(&to) == pages_before, "{kind:?}: a device would go on with other pages");
        common::assert_arrived(&outcome, &arrival, &target);
        assert!(migration.statistics().zero_pages + migration.statistics().absent_pages > 1000);
    }
}

/// Migrates, and cancels after some pages have arrived.
fn cancel_on_the_way(source: &Arc<ProcessGuest>, target: &Arc<ProcessGuest>) {
    let (params, capabilities) = common::multifd(2);
    // The migration waits for the operator at the end, so a late cancel still finds it running.
    let capabilities = Capabilities { pause_before_switchover: true, ..capabilities };
    let incoming = common::listen(target, &params, capabilities);
    let migration = common::start(source, &incoming.address(), &params, capabilities, Arc::new(()));
    // On a quiet host it converges before this number of pages is sent, and waits.
    let is_over = |status: Status| status == Status::PreSwitchover || status.is_terminal();
    while migration.statistics().normal_pages < 500 && !is_over(migration.status()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    migration.cancel().unwrap();
    let (outcome, arrival) = (migration.wait(), incoming.wait());
    assert!(matches!(outcome, Outcome::Cancelled), "{outcome:?}");
    assert!(matches!(arrival, Arrival::Failed(_)), "{arrival:?}");
}

#[test]
fn migration_that_fails_leaves_the_vmms_memory_in_place_and_zero() {
    for kind in KINDS {
        let (from, to) = (memory(kind), memory(kind));
        let (source, target) = (boot(&from, Fill::Zero), waiting(ram(&to, MemoryPermissions::none())));
        pin(&ram(&to, MemoryPermissions::none()), 0xee);
        let (maps_before, pages_before) = (maps(&to), physical_pages(&to));

        cancel_on_the_way(&source, &target);

        assert_eq!(maps(&to), maps_before, "{kind:?}");
        assert!(physical_pages(&to) == pages_before, "{kind:?}");
        assert!(is_all_zero(&ram(&to, MemoryPermissions::none())), "{kind:?}");
        // The next migration finds all pages populated. The guest must arrive complete nevertheless.
        let (params, capabilities) = common::multifd(2);
        let (_, outcome, arrival) = common::migrate(&source, &target, &params, capabilities);
        assert!((maps(&to), physical_pages(&to)) == (maps_before, pages_before), "{kind:?}");
        common::assert_arrived(&outcome, &arrival, &target);
    }
}

/// A hook that cannot be acquired here.
struct Refuses;

impl Hook for Refuses {
    fn name(&self) -> String {
        "lease".to_owned()
    }
    fn acquire(&self) -> Result<(), VmError> {
        Err(VmError::new("acquire the lease", "another host holds it"))
    }
}

#[test]
fn migration_that_fails_after_all_was_loaded_leaves_the_vmms_memory_zero() {
    for (kind, lanes) in [(Kind::Anonymous, 0), (Kind::Shared, 2)] {
        let (from, to) = (memory(kind), memory(kind));
        let view = |memory| ram(memory, MemoryPermissions::none());
        let (source, target) = (Plain::new(view(&from)), Plain::new(view(&to)));
        (0..500).for_each(|page| source.write(page, 7));
        pin(&target.ram, 0xee);
        target.add_hook(Arc::new(Refuses));

        let (outcome, arrival) = move_plain(&source, &target, lanes);

        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        assert!(matches!(arrival, Arrival::Failed(_)), "{arrival:?}");
        assert!(is_all_zero(&view(&to)), "{kind:?}: bytes of a guest that never came are left");
    }
}

/// Checks that `migration_that_fails_leaves_the_vmms_memory_in_place_and_zero` can detect an engine that gives memory
/// back without permission. Here the engine has the permission.
#[test]
fn memory_given_back_when_a_migration_fails_is_noticed() {
    let (from, to) = (memory(Kind::Anonymous), memory(Kind::Anonymous));
    let with_leave = ram(&to, MemoryPermissions::none().allow_discard());
    let (source, target) = (boot(&from, Fill::Zero), waiting(with_leave));
    pin(&ram(&to, MemoryPermissions::none()), 0xee);
    let Some(pages_before) = physical_pages(&to) else {
        return skipped("SKIPPED memory_given_back_when_a_migration_fails_is_noticed: no privilege");
    };

    cancel_on_the_way(&source, &target);

    assert!(physical_pages(&to) != Some(pages_before));
}

#[test]
fn guest_tracked_by_userfaultfd_leaves_the_vmms_memory_as_it_was() {
    if !Tracking::available().contains(&Tracking::Userfaultfd) {
        return skipped("SKIPPED guest_tracked_by_userfaultfd_...: no asynchronous userfaultfd");
    }
    for kind in [Kind::Anonymous, Kind::Shared] {
        let (from, to) = (memory(kind), memory(kind));
        let config = ProcessConfig { tracking: Tracking::Userfaultfd, ..config() };
        let with_leave = ram(&from, MemoryPermissions::none().allow_userfaultfd());
        let source = ProcessGuest::boot_in(config.clone(), with_leave).unwrap();
        source.cont().unwrap();
        let target = waiting(ram(&to, MemoryPermissions::none()));
        let maps_before = (maps(&from), maps(&to));
        let (params, capabilities) = common::multifd(2);

        let (_, outcome, arrival) = common::migrate(&source, &target, &params, capabilities);

        assert_eq!((maps(&from), maps(&to)), maps_before, "{kind:?}");
        common::assert_arrived(&outcome, &arrival, &target);
        let without = ProcessGuest::boot_in(config, ram(&from, MemoryPermissions::none())).unwrap();
        let incoming =
            common::listen(&waiting(ram(&memory(kind), MemoryPermissions::none())), &params, capabilities);
        let refused = common::start(&without, &incoming.address(), &params, capabilities, Arc::new(()));
        let Outcome::Failed { error, .. } = refused.wait() else { panic!("no leave for userfaultfd") };
        assert!(matches!(cause(&error), Some(DirtyError::NotPermitted { .. })), "{error:?}");
        let _ = incoming.cancel();
        incoming.wait();
    }
}

const ROM_PAGES: u64 = 40;

/// A VM with RAM and a ROM that is mapped read-only and contains `version`.
fn with_rom(version: u8) -> (Arc<Plain>, GuestMemoryMmap) {
    let file = memfd(ROM_PAGES << 12);
    for page in (0..ROM_PAGES).step_by(3) {
        file.write_all_at(&[version; PAGE_SIZE], page << 12).unwrap();
    }
    let memory = GuestMemoryMmap::from_regions(vec![
        region(0, MIB, READ_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, None),
        region(4 << 30, ROM_PAGES << 12, 1, MAP_SHARED, Some((&file, 0))),
    ])
    .unwrap();
    (Plain::new(ram(&memory, MemoryPermissions::none())), memory)
}

fn move_plain(source: &Arc<Plain>, target: &Arc<Plain>, lanes: u8) -> (Outcome, Arrival) {
    let (params, mut capabilities) = common::multifd(lanes.max(1));
    capabilities.multifd = lanes > 0;
    let at = "tcp:127.0.0.1:0".parse().unwrap();
    let vm = Arc::clone(target) as _;
    let incoming = sterna::Incoming::listen(vm, &at, params.clone(), capabilities, Arc::new(())).unwrap();
    let vm = Arc::clone(source) as _;
    let migration =
        sterna::Migration::start(vm, &incoming.address(), params, capabilities, Arc::new(())).unwrap();
    (migration.wait(), incoming.wait())
}

#[test]
fn read_only_memory_is_compared_and_not_written() {
    for lanes in [0, 2] {
        let ((source, _), (target, memory)) = (with_rom(7), with_rom(7));
        source.write(3, 9);
        let maps_before = maps(&memory);
        let (outcome, arrival) = move_plain(&source, &target, lanes);
        assert!(
            matches!((&outcome, &arrival), (Outcome::Completed, Arrival::Completed(_))),
            "{outcome:?} {arrival:?}"
        );
        assert_eq!((byte_of(&target.ram, 3), maps(&memory)), (9, maps_before));

        let (source, (target, _)) = (with_rom(7).0, with_rom(8));
        let (outcome, arrival) = move_plain(&source, &target, lanes);
        let Arrival::Failed(error) = arrival else { panic!("{outcome:?} {arrival:?}") };
        let MigrationError::PeerIncompatible(Difference::Machine(why)) = &error else { panic!("{error}") };
        assert!(matches!(why, MachineDifference::ReadOnlyBlock { block, .. } if block == "ram1"), "{error}");
        assert!(matches!(outcome, Outcome::Failed { held: false, .. }), "{outcome:?}");
        let mut rom = [0];
        target.ram.block(1).read(0, &mut rom).unwrap();
        assert_eq!(rom, [8], "the ROM is as it was");
    }
}

#[test]
fn declared_fresh_memory_is_not_touched_by_zero_pages() {
    // The kernel cannot report which of its pages are populated. Without the promise of fresh memory, all pages are
    // read.
    let shared = |is_fresh: bool, bytes: u64| {
        let memory: GuestMemoryMmap = GuestMemoryMmap::from_regions(vec![region(
            0,
            bytes,
            READ_WRITE,
            MAP_SHARED | MAP_ANONYMOUS,
            None,
        )])
        .unwrap();
        let plan = |_, _: &GuestRegionMmap| {
            let plan = RegionPlan::named("ram");
            if is_fresh { plan.fresh() } else { plan }
        };
        let ram = GuestRam::from_guest_memory(&memory, plan).unwrap();
        (Plain::new(ram), memory)
    };
    for (is_fresh, bytes) in [(true, 8192 * MIB), (false, 64 * MIB)] {
        let block = RamBlock::new("ram", bytes, Backing::Memfd).unwrap();
        let source = Plain::new(GuestRam::new(vec![block]).unwrap());
        (0..16384).step_by(128).for_each(|page| source.write(page, 3));
        let (target, memory) = shared(is_fresh, bytes);
        let (outcome, _) = move_plain(&source, &target, 2);
        assert!(matches!(outcome, Outcome::Completed), "{outcome:?}");
        let Some(pages) = physical_pages(&memory) else {
            return skipped("SKIPPED declared_fresh_memory_is_not_touched_by_zero_pages: no privilege");
        };
        let resident = pages.iter().filter(|page| **page != 0).count();
        assert_eq!(resident, if is_fresh { 128 } else { 16384 }, "fresh: {is_fresh}");
        assert!((0..16384).all(|page| byte_of(&target.ram, page) == if page % 128 == 0 { 3 } else { 0 }));
    }
}

#[test]
fn memory_is_plugged_between_migrations_and_not_during_one() {
    let from = memory(Kind::Anonymous);
    let (source, target) =
        (boot(&from, Fill::Zero), waiting(ram(&memory(Kind::Shared), MemoryPermissions::none())));
    let guest_ram = sterna::Vm::ram(&*source);
    let dimm = || RamBlock::new("dimm0", 4 * MIB, Backing::Anonymous).unwrap();
    let plugged = |ram: &GuestRam| ram.with_blocks(ram.blocks().iter().cloned().chain([dimm()]).collect());
    let (params, capabilities) = common::multifd(2);
    let capabilities = Capabilities { pause_before_switchover: true, ..capabilities };
    let incoming = common::listen(&target, &params, capabilities);
    let migration = common::start(&source, &incoming.address(), &params, capabilities, Arc::new(()));
    while !matches!(migration.status(), Status::Active | Status::PreSwitchover) {
        std::thread::sleep(Duration::from_millis(1));
    }

    let during = [plugged(&guest_ram), plugged(&sterna::Vm::ram(&*target))].map(Result::unwrap_err);
    migration.cancel().unwrap();
    migration.wait();
    incoming.wait();

    for error in during {
        assert!(matches!(error, ChangeError::Migrating(_) | ChangeError::Tracked), "{error}");
    }
    // Afterwards the change succeeds, and the custody applies to the new RAM.
    let now = plugged(&guest_ram).unwrap();
    assert_eq!((guest_ram.custody(), now.custody()), (Custody::Replaced, Custody::Free));
    assert!(guest_ram.while_free(|| ()).is_err() && now.while_free(|| ()).is_ok());
    let vm = Arc::clone(&source) as _;
    let stale = sterna::Migration::start(vm, &incoming.address(), params, capabilities, Arc::new(()));
    assert!(matches!(stale.err(), Some(sterna::StartError::Guest(Custody::Replaced))));
    // The guest in that RAM migrates.
    let (source, target) = (Plain::new(now), {
        let blocks = REGIONS.iter().enumerate().map(|(index, (_, len))| (format!("ram{index}"), *len));
        let blocks = blocks.chain([("dimm0".to_owned(), 4 * MIB)]);
        let blocks = blocks.map(|(name, len)| RamBlock::new(name, len, Backing::Memfd).unwrap());
        Plain::new(GuestRam::new(blocks.collect()).unwrap())
    });
    source.ram.block(3).write(0, b"dimm").unwrap();
    let (outcome, arrival) = move_plain(&source, &target, 2);
    assert!(
        matches!((&outcome, &arrival), (Outcome::Completed, Arrival::Completed(_))),
        "{outcome:?} {arrival:?}"
    );
    let mut came = [0; 4];
    target.ram.block(3).read(0, &mut came).unwrap();
    assert_eq!(&came, b"dimm");
}

#[test]
fn memory_changed_behind_the_engines_back_fails_the_migration() {
    let ram = || GuestRam::new(vec![RamBlock::new("ram", MIB, Backing::Memfd).unwrap()]).unwrap();
    for is_source in [true, false] {
        let (source, target) = (Plain::new(ram()), Plain::new(ram()));
        source.write(7, 7);
        let changes = Arc::clone(if is_source { &source } else { &target });
        source.at_last(move |_| changes.change_ram(ram()));

        let (outcome, arrival) = move_plain(&source, &target, 2);

        let (Outcome::Failed { error: ours, held: false }, Arrival::Failed(theirs)) = (&outcome, &arrival)
        else {
            panic!("{outcome:?}, {arrival:?}")
        };
        let error = if is_source { ours } else { theirs };
        assert!(matches!(error, MigrationError::RamChanged), "{error}");
        assert_eq!(source.ram.custody(), Custody::Free, "the guest runs on");
    }
}
