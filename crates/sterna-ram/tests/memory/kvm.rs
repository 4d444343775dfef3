//! KVM's dirty log under a real guest: a few integer instructions in real mode.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::slots::{set_slot, slot};
use crate::support::skipped;
use crate::write_protection::{Served, protection};
use kvm_bindings::kvm_regs;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use sterna_ram::dirty::{KvmDirtyLog, KvmLogMode, KvmSlot};
use sterna_ram::{Backing, DirtyBitmaps, DirtyError, DirtySource, GuestRam, PAGE_SIZE, PageBitmap, RamBlock};

const PAGE: u64 = PAGE_SIZE as u64;
const NONE: Vec<u64> = Vec::new();
/// Guest address of the code: page 1, before all pages that the guest writes.
const CODE: u64 = 0x1000;

/// Writes CX pages from segment BX on, each 1 << 8 paragraphs (4 KiB) after the last, and halts.
///
/// The first word of each page gets the counter.
const GUEST: &[u8] = &[
    0x8e, 0xdb, // mov ds, bx
    0x89, 0x0e, 0x00, 0x00, // mov [0], cx
    0x81, 0xc3, 0x00, 0x01, // add bx, 0x100
    0x49, // dec cx
    0x75, 0xf3, // jnz to the start
    0xf4, // hlt
];

struct Machine {
    ram: GuestRam,
    vcpu: VcpuFd,
    vm: VmFd,
    slots: Vec<KvmSlot>,
}

/// A machine whose slots begin inside words of the bitmaps.
///
/// - 150 pages from page 5 of block 0, at the guest's page 0.
/// - 70 pages from page 155 of block 0, after those.
/// - all 100 pages of block 1, after those.
fn machine(test: &str) -> Option<Machine> {
    machine_of(test, vec![slot(0, 0, 0, 5, 150), slot(1, 150, 0, 155, 70), slot(7, 220, 1, 0, 100)])
}

/// Makes a machine with these slots. The guest can reach its pages below 256.
fn machine_of(test: &str, slots: Vec<KvmSlot>) -> Option<Machine> {
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            skipped(test, format!("/dev/kvm: {error}"));
            return None;
        }
    };
    let block = |name: &str, pages| RamBlock::new(name, pages * PAGE, Backing::Memfd).unwrap();
    let ram = GuestRam::new(vec![block("a", 230), block("b", 100)]).unwrap();
    let vm = kvm.create_vm().unwrap();
    slots.iter().for_each(|slot| set_slot(&vm, &ram, slot));
    ram.block(0).write(5 * PAGE + CODE, GUEST).unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    vcpu.set_sregs(&sregs).unwrap();
    Some(Machine { ram, vcpu, vm, slots })
}

impl Machine {
    /// Creates a slot in the running VM.
    fn add(&mut self, slot: KvmSlot) {
        set_slot(&self.vm, &self.ram, &slot);
        self.slots.push(slot);
    }

    fn log(&self, mode: KvmLogMode) -> KvmDirtyLog {
        let vm: OwnedFd =
            // SAFETY: borrowed for the duplication only.
            unsafe { BorrowedFd::borrow_raw(self.vm.as_raw_fd()) }.try_clone_to_owned().unwrap();
        KvmDirtyLog::new(vm, self.slots.clone(), self.ram.clone()).unwrap().with_mode(mode)
    }

    /// Runs the guest until it has written its pages `[first, first + count)`.
    fn write(&mut self, first: u64, count: u64) {
        let regs = kvm_regs { rip: CODE, rflags: 2, rbx: first << 8, rcx: count, ..Default::default() };
        self.vcpu.set_regs(&regs).unwrap();
        match self.vcpu.run().unwrap() {
            VcpuExit::Hlt => {}
            other => panic!("the guest stopped with {other:?}"),
        }
    }

    fn sync(&self, log: &KvmDirtyLog) -> [Vec<u64>; 2] {
        let mut found = DirtyBitmaps::new(&self.ram);
        assert_eq!(log.sync(&mut found).unwrap().newly_dirty, found.count());
        [set(found.block(0)), set(found.block(1))]
    }

    fn rearm_all(&self, log: &KvmDirtyLog) {
        for (index, block) in self.ram.blocks().iter().enumerate() {
            let all = PageBitmap::new(block.pages());
            all.set_all();
            log.rearm(index, 0, block.pages(), &all).unwrap();
        }
    }
}

fn set(bitmap: &PageBitmap) -> Vec<u64> {
    (0..bitmap.pages()).filter(|page| bitmap.get(*page)).collect()
}

fn pages(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

/// Starts a log in this mode, and takes its first reports; `None` if the kernel lacks the mode.
fn started(machine: &Machine, mode: KvmLogMode, test: &str) -> Option<KvmDirtyLog> {
    let log = machine.log(mode);
    log.start().unwrap();
    if log.mode() != Some(mode) {
        skipped(test, format!("the kernel has only {:?}", log.mode()));
        return None;
    }
    assert_eq!(log.initially_set(), mode == KvmLogMode::InitiallySet);
    if log.initially_set() {
        assert_eq!(machine.sync(&log), [pages(5..225), pages(0..100)], "all is reported at first");
        machine.rearm_all(&log);
    }
    assert_eq!(machine.sync(&log), [NONE, NONE]);
    Some(log)
}

#[test]
fn kvm_log_pages_written_by_the_guest_are_synced_over_crooked_slots() {
    let test = "kvm_log_pages_written_by_the_guest_are_synced_over_crooked_slots";
    for mode in [KvmLogMode::InitiallySet, KvmLogMode::Manual, KvmLogMode::Automatic] {
        let Some(mut machine) = machine(test) else { return };
        let Some(log) = started(&machine, mode, test) else { continue };

        // Across the borders of all three slots: guest pages 140 to 229.
        machine.write(140, 90);

        let expected = [pages(145..225), pages(0..10)];
        assert_eq!(machine.sync(&log), expected, "{mode:?}");
        machine.ram.block(0).read_u64(145 * PAGE).unwrap();
        assert_eq!(machine.ram.block(0).read_u64(145 * PAGE).unwrap() & 0xffff, 90, "the guest did write");
        if mode == KvmLogMode::Automatic {
            assert_eq!(machine.sync(&log), [NONE, NONE], "syncing re-armed");
        } else {
            assert_eq!(machine.sync(&log), expected, "reported until re-armed");
            machine.rearm_all(&log);
            assert_eq!(machine.sync(&log), [NONE, NONE], "re-armed");
        }
        machine.write(150, 1);
        assert_eq!(machine.sync(&log), [vec![155], vec![]], "the next write is seen again");
    }
}

#[test]
fn kvm_log_rearms_what_was_synced_in_the_range_and_nothing_else() {
    let test = "kvm_log_rearms_what_was_synced_in_the_range_and_nothing_else";
    for mode in [KvmLogMode::InitiallySet, KvmLogMode::Manual] {
        let Some(mut machine) = machine(test) else { return };
        let Some(log) = started(&machine, mode, test) else { continue };
        machine.write(20, 200); // block 0's pages 25 to 224
        let synced = PageBitmap::new(230);
        synced.set_range(0, 230);
        synced.clear_range(100, 10); // as if these had been written after the sync
        // Block pages 64..128: neither border is at a word of the slot's bitmap.
        log.rearm(0, 64, 64, &synced).unwrap();

        let left = machine.sync(&log);

        let expected: Vec<u64> =
            (25..225).filter(|page| !(64..128).contains(page) || (100..110).contains(page)).collect();
        assert_eq!(left, [expected, vec![]], "{mode:?}");
        // The last range, which ends with the block, and the border of two slots.
        log.rearm(0, 128, 102, &synced).unwrap();
        assert!(machine.sync(&log)[0].iter().all(|page| *page < 110));
    }
}

#[test]
fn kvm_log_stopped_leaves_the_vm_as_it_was() {
    let test = "kvm_log_stopped_leaves_the_vm_as_it_was";
    let Some(mut machine) = machine(test) else { return };
    let Some(log) = started(&machine, KvmLogMode::Manual, test) else { return };
    machine.write(10, 5);
    log.stop().unwrap();
    log.stop().unwrap();
    assert!(matches!(log.sync(&mut DirtyBitmaps::new(&machine.ram)), Err(DirtyError::NotStarted { .. })));
    assert!(machine.vm.get_dirty_log(0, 150 * PAGE_SIZE).is_err(), "the slot logs no more");
    machine.write(10, 5);

    // A log that the VMM uses itself works as before the start: GET clears.
    let plain = machine.log(KvmLogMode::Automatic);
    plain.start().unwrap();
    machine.write(30, 2);
    assert_eq!(machine.sync(&plain), [vec![35, 36], vec![]]);
    assert_eq!(machine.sync(&plain), [NONE, NONE], "manual protection is off again");
    drop(plain);
    assert!(machine.vm.get_dirty_log(0, 150 * PAGE_SIZE).is_err(), "dropping stops it");

    log.start().unwrap();
    machine.write(40, 1);
    assert_eq!(machine.sync(&log), [vec![45], vec![]], "it can start again");
}

#[test]
fn kvm_log_failing_start_leaves_no_slot_logging() {
    let Some(machine) = machine("kvm_log_failing_start_leaves_no_slot_logging") else { return };
    let mut slots = machine.slots.clone();
    slots[2].guest_address = 0; // lies over slot 0: KVM refuses
    // SAFETY: borrowed for the duplication only.
    let vm = unsafe { BorrowedFd::borrow_raw(machine.vm.as_raw_fd()) }.try_clone_to_owned().unwrap();
    let log = KvmDirtyLog::new(vm, slots, machine.ram.clone()).unwrap();
    match log.start() {
        Err(DirtyError::System { call: "KVM_SET_USER_MEMORY_REGION", index: 7, .. }) => {}
        other => panic!("{other:?}"),
    }
    assert!(machine.vm.get_dirty_log(0, 150 * PAGE_SIZE).is_err());
    assert!(matches!(log.sync(&mut DirtyBitmaps::new(&machine.ram)), Err(DirtyError::NotStarted { .. })));
}

#[test]
fn kvm_log_slots_that_do_not_fit_are_refused() {
    let block = RamBlock::new("a", 10 * PAGE, Backing::Memfd).unwrap();
    let ram = GuestRam::new(vec![block]).unwrap();
    let good = KvmSlot { slot: 3, flags: 0, guest_address: 0, block: 0, first_page: 0, pages: 10 };
    let new = |slot| {
        let fd = std::fs::File::open("/dev/null").unwrap().into();
        KvmDirtyLog::new(fd, vec![slot], ram.clone()).map(|_| ())
    };
    assert!(new(good).is_ok());
    for bad in [
        KvmSlot { block: 1, ..good },
        KvmSlot { first_page: 1, ..good },
        KvmSlot { first_page: u64::MAX, ..good },
        KvmSlot { pages: 0, ..good },
        KvmSlot { flags: 1, ..good },
    ] {
        assert!(matches!(new(bad), Err(DirtyError::Slot { slot: 3, .. })), "{bad:?}");
    }
}

#[test]
fn page_written_through_an_alias_is_dirty_in_every_mode() {
    for mode in [KvmLogMode::Automatic, KvmLogMode::Manual, KvmLogMode::InitiallySet] {
        let test = "page_written_through_an_alias_is_dirty_in_every_mode";
        // Pages 20..60 of block 1 are mapped a second time, at the guest's pages 200..240.
        let slots = vec![slot(0, 0, 0, 5, 90), slot(7, 100, 1, 0, 100), slot(9, 200, 1, 20, 40)];
        let Some(mut machine) = machine_of(test, slots) else { return };
        let log = machine.log(mode);
        log.start().unwrap();
        if log.mode() != Some(mode) {
            skipped(test, format!("the kernel has only {:?}", log.mode()));
            continue;
        }
        machine.sync(&log);
        machine.rearm_all(&log);

        machine.write(205, 2);
        machine.write(100 + 26, 2);

        assert_eq!(machine.sync(&log), [NONE, pages(25..28)], "{mode:?}: by the alias and by the slot");
        machine.rearm_all(&log);
        assert_eq!(machine.sync(&log), [NONE, NONE], "{mode:?}");
        machine.write(100 + 25, 1);
        assert_eq!(machine.sync(&log), [NONE, pages(25..26)], "{mode:?}: re-arming armed both");
        log.stop().unwrap();
    }
}

#[test]
fn slots_are_replaced_between_migrations_alone() {
    let test = "slots_are_replaced_between_migrations_alone";
    let slots = vec![slot(0, 0, 0, 5, 90), slot(7, 100, 1, 0, 100)];
    let Some(mut machine) = machine_of(test, slots) else { return };
    let log = machine.log(KvmLogMode::Manual);
    log.start().unwrap();
    // Memory is plugged: the VM has another slot, and the guest another block.
    let plugged = RamBlock::new("c", 10 * PAGE, Backing::Memfd).unwrap();
    let ram = GuestRam::new(machine.ram.blocks().iter().cloned().chain([plugged]).collect()).unwrap();
    machine.ram = ram.clone();
    machine.add(slot(11, 210, 2, 0, 10));
    let replace = || log.replace_slots(machine.slots.clone(), ram.clone());
    assert!(matches!(replace(), Err(DirtyError::Running { .. })));
    log.stop().unwrap();
    replace().unwrap();

    log.start().unwrap();
    machine.write(213, 2);

    let mut found = DirtyBitmaps::new(&ram);
    log.sync(&mut found).unwrap();
    assert_eq!(set(found.block(2)), [3, 4]);
    let outside = slot(12, 240, 3, 0, 1);
    log.stop().unwrap();
    assert!(matches!(log.replace_slots(vec![outside], ram), Err(DirtyError::Slot { .. })));
}

#[test]
fn vcpu_that_writes_a_protected_page_waits_and_its_write_is_reported() {
    let test = "vcpu_that_writes_a_protected_page_waits_and_its_write_is_reported";
    for mode in [KvmLogMode::InitiallySet, KvmLogMode::Manual, KvmLogMode::Automatic] {
        let Some(mut machine) = machine(test) else { return };
        let Some(log) = started(&machine, mode, test) else { continue };
        let Some(protection) = protection(&machine.ram, test) else { return };
        // Pages that the guest has mapped writable, and pages that it has never accessed.
        machine.write(100, 10);
        assert_eq!(machine.sync(&log)[0], pages(105..115));
        machine.rearm_all(&log);
        let before: Vec<_> =
            (105..125).map(|page| machine.ram.block(0).read_u64(page * PAGE).unwrap()).collect();

        protection.protect(0, 105, 20).unwrap();
        let served = Served::new(&machine.ram, &protection);
        machine.write(95, 40);

        let expected: Vec<_> = (105..125).zip(before).collect();
        assert_eq!(*served.held.lock(), expected, "{mode:?}: who was held, and what the pages had");
        assert_eq!(machine.sync(&log)[0], pages(100..140), "{mode:?}");
        assert_eq!(
            machine.ram.block(0).read_u64(105 * PAGE).unwrap() & 0xffff,
            35,
            "{mode:?}: the guest did write"
        );
    }
}
