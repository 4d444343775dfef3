//! KVM's dirty rings under a real guest: a few integer instructions in protected mode, on one or two vCPUs.

use std::cell::Cell;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::slots::{set_slot, slot};
use crate::support::{self, skipped};
use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use sterna_ram::dirty::{KvmDirtyRing, KvmDirtyRings};
use sterna_ram::{Backing, DirtyBitmaps, DirtyError, DirtySource, GuestRam, PAGE_SIZE, RamBlock};

const PAGE: u64 = PAGE_SIZE as u64;
const NONE: Vec<u64> = Vec::new();
/// Guest address of the code: page 1, before all pages that the guest writes.
const CODE: u64 = 0x1000;
/// Sizes of the rings to try. Processors that log pages themselves need the larger one.
const SIZES: [u32; 2] = [256, 1024];

/// Writes EDX into the first word of ECX pages from address EBX on, and halts.
const GUEST: &[u8] = &[
    0x89, 0x13, // mov [ebx], edx
    0x81, 0xc3, 0x00, 0x10, 0x00, 0x00, // add ebx, 4096
    0x49, // dec ecx
    0x75, 0xf5, // jnz to the start
    0xf4, // hlt
];

struct Machine {
    ring: KvmDirtyRing,
    vcpus: Vec<VcpuFd>,
    entries: u32,
    /// Overruns up to the last sync. Earlier overruns do not make later syncs inexact.
    overruns: Cell<u64>,
    vm: VmFd,
    ram: GuestRam,
}

/// A machine with the smallest rings that its kernel supports. The slots begin inside words of the bitmaps.
///
/// - `low` pages from page 5 of block 0, at the guest's page 0.
/// - 70 pages from page `low + 5` of block 0, after those.
/// - all 100 pages of block 1, after those.
fn machine(test: &str, low: u64, vcpus: u64) -> Option<Machine> {
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            skipped(test, format!("/dev/kvm: {error}"));
            return None;
        }
    };
    let block = |name: &str, pages| RamBlock::new(name, pages * PAGE, Backing::Memfd).unwrap();
    let ram = GuestRam::new(vec![block("a", low + 80), block("b", 100)]).unwrap();
    let slots = vec![slot(0, 0, 0, 5, low), slot(1, low, 0, low + 5, 70), slot(7, low + 70, 1, 0, 100)];
    for entries in SIZES {
        let vm = kvm.create_vm().unwrap();
        if KvmDirtyRings::most_entries(fd(&vm)) == 0 {
            skipped(test, "the kernel has no dirty rings");
            return None;
        }
        let rings = match KvmDirtyRings::enable(owned(&vm), entries) {
            Ok(rings) => rings,
            Err(DirtyError::RingSize { .. }) => continue,
            Err(error) => panic!("{error}"),
        };
        slots.iter().for_each(|slot| set_slot(&vm, &ram, slot));
        ram.block(0).write(5 * PAGE + CODE, GUEST).unwrap();
        let vcpus: Vec<VcpuFd> = (0..vcpus).map(|index| vcpu(&vm, index)).collect();
        let fds: Vec<_> = vcpus.iter().map(fd).collect();
        let ring = rings.source(&fds, slots, ram.clone()).unwrap();
        return Some(Machine { ring, vcpus, entries, overruns: Cell::new(0), vm, ram });
    }
    panic!("no size of {SIZES:?} is good enough");
}

fn fd(of: &impl AsRawFd) -> BorrowedFd<'_> {
    // SAFETY: the result borrows `of`, which owns the descriptor.
    unsafe { BorrowedFd::borrow_raw(of.as_raw_fd()) }
}

fn owned(of: &impl AsRawFd) -> OwnedFd {
    fd(of).try_clone_to_owned().unwrap()
}

fn vcpu(vm: &VmFd, index: u64) -> VcpuFd {
    let vcpu = vm.create_vcpu(index).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    let flat = |selector, type_| kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        s: 1,
        g: 1,
        db: 1,
        ..Default::default()
    };
    (sregs.cs, sregs.ds, sregs.cr0) = (flat(8, 11), flat(16, 3), 0x11);
    (sregs.es, sregs.ss) = (sregs.ds, sregs.ds);
    vcpu.set_sregs(&sregs).unwrap();
    vcpu
}

/// Runs the guest until it has written `value` into its pages `[first, first + count)`. This may take several
/// runs.
fn write(ring: &KvmDirtyRing, index: usize, vcpu: &mut VcpuFd, first: u64, count: u64, value: u64) {
    let regs =
        kvm_regs { rip: CODE, rflags: 2, rbx: first * PAGE, rcx: count, rdx: value, ..Default::default() };
    vcpu.set_regs(&regs).unwrap();
    loop {
        match vcpu.run().unwrap() {
            VcpuExit::Hlt => return,
            VcpuExit::Unsupported(KvmDirtyRing::EXIT_RING_FULL) => ring.reap_full(index).unwrap(),
            other => panic!("the guest stopped with {other:?}"),
        }
    }
}

impl Machine {
    fn write(&mut self, vcpu: usize, first: u64, count: u64) {
        write(&self.ring, vcpu, &mut self.vcpus[vcpu], first, count, 1);
    }

    /// Syncs and checks that at least these pages are reported, and exactly these if there was no overrun.
    fn assert_sync(&self, expected: [Vec<u64>; 2]) {
        let before = self.overruns.get();
        let found = self.sync();
        let overruns = self.overruns.get() - before;
        if overruns == 0 {
            assert_eq!(found, expected);
        }
        for (found, expected) in found.iter().zip(&expected) {
            assert!(expected.iter().all(|page| found.contains(page)), "{overruns} overruns, {found:?}");
        }
    }

    fn sync(&self) -> [Vec<u64>; 2] {
        let mut found = DirtyBitmaps::new(&self.ram);
        let newly = self.ring.sync(&mut found).unwrap().newly_dirty;
        assert_eq!(newly, found.count());
        self.overruns.set(self.ring.overruns());
        [0, 1].map(|block| {
            let bitmap = found.block(block);
            (0..bitmap.pages()).filter(|page| bitmap.get(*page)).collect()
        })
    }
}

fn note(test: &str, ring: &KvmDirtyRing) {
    support::say(&format!(
        "{test}: {} times full, {} overruns, {:?} pages",
        ring.full_exits(),
        ring.overruns(),
        ring.reported()
    ));
}

fn pages(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

#[test]
fn ring_pages_written_by_the_guest_are_synced_once_over_crooked_slots() {
    let test = "ring_pages_written_by_the_guest_are_synced_once_over_crooked_slots";
    let Some(mut machine) = machine(test, 150, 1) else { return };
    machine.write(0, 10, 20);
    machine.ring.start().unwrap();
    assert!(!machine.ring.initially_set());
    assert_eq!(machine.sync(), [NONE, NONE], "what was written before is nobody's business");

    // Across the borders of all three slots: guest pages 140 to 229.
    machine.write(0, 140, 90);

    assert_eq!(machine.sync(), [pages(145..225), pages(0..10)]);
    assert_eq!(machine.sync(), [NONE, NONE], "syncing re-armed");
    machine.write(0, 150, 1);
    machine.write(0, 150, 1);
    assert_eq!(machine.sync(), [vec![155], vec![]], "the next write is seen again");
    assert_eq!(machine.ring.reported(), [91]);
    assert_eq!(machine.ring.full_exits(), 0);
}

#[test]
fn ring_that_runs_full_loses_nothing() {
    let test = "ring_that_runs_full_loses_nothing";
    let Some(mut machine) = machine(test, 8000, 1) else { return };
    machine.ring.start().unwrap();

    for round in 1..=5 {
        machine.write(0, 2, 7900);

        let full = machine.ring.full_exits();
        assert!(
            full >= round * (7900 / u64::from(machine.entries)) / 4,
            "{full} times full in {round} rounds"
        );
        machine.assert_sync([pages(7..7907), vec![]]);
    }
    note(test, &machine.ring);
}

#[test]
fn ring_counts_what_each_vcpu_wrote_without_taking_it() {
    let test = "ring_counts_what_each_vcpu_wrote_without_taking_it";
    let Some(mut machine) = machine(test, 150, 2) else { return };
    machine.ring.start().unwrap();
    machine.write(0, 10, 30);
    machine.write(1, 35, 10); // five of them are the other's already
    assert_eq!(machine.ring.reported(), [0, 0], "nobody has looked");

    machine.ring.poll().unwrap();
    machine.ring.poll().unwrap();

    assert_eq!(machine.ring.reported(), [30, 5]);
    assert_eq!(machine.sync(), [pages(15..50), vec![]]);
    machine.write(1, 10, 3);
    machine.sync();
    assert_eq!(machine.ring.reported(), [30, 8]);
}

/// Rounds over the ring while two vCPUs write, one of them also the other's pages: the copy must equal the RAM.
#[test]
fn ring_synced_while_vcpus_write_leaves_an_exact_copy() {
    let test = "ring_synced_while_vcpus_write_leaves_an_exact_copy";
    let Some(mut machine) = machine(test, 1000, 2) else { return };
    let mut random = sterna_testing::random(test);
    let Machine { ring, vcpus, ram, .. } = &mut machine;
    let (ring, ram) = (&*ring, &*ram);
    let copy: Vec<RamBlock> = ram
        .blocks()
        .iter()
        .map(|b| RamBlock::new(b.name(), b.len_bytes(), Backing::Memfd).unwrap())
        .collect();
    let mut page = vec![0; PAGE_SIZE];
    let mut send = |dirty: &DirtyBitmaps| {
        for (index, to) in copy.iter().enumerate() {
            while let Some(run) = dirty.block(index).take_run(0, to.pages(), 1) {
                ram.block(index).read(run.first * PAGE, &mut page).unwrap();
                to.write(run.first * PAGE, &page).unwrap();
            }
        }
    };
    let mut dirty = DirtyBitmaps::new(ram);
    ring.start().unwrap();
    dirty.set_all();
    let (done, seeds) = (AtomicBool::new(false), [random.u64(..), random.u64(..)]);

    let mut rounds = 0;
    std::thread::scope(|scope| {
        let writers: Vec<_> = vcpus
            .iter_mut()
            .enumerate()
            .map(|(index, vcpu)| {
                let (seed, done) = (seeds[index], &done);
                scope.spawn(move || {
                    for pass in 1..=400u64 {
                        let first = 2 + (seed.wrapping_mul(pass) >> 32) % 500;
                        write(ring, index, vcpu, first, 600, pass);
                    }
                    done.store(true, Ordering::Release);
                })
            })
            .collect();
        while !done.load(Ordering::Acquire) {
            ring.poll().unwrap();
            ring.sync(&mut dirty).unwrap();
            send(&dirty);
            rounds += 1;
        }
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
    ring.sync(&mut dirty).unwrap();
    send(&dirty);

    assert!(rounds > 3 && ring.full_exits() > 3, "{rounds} rounds, {} times full", ring.full_exits());
    note(test, ring);
    for (from, to) in ram.blocks().iter().zip(&copy) {
        for at in (0..from.len_bytes()).step_by(PAGE_SIZE) {
            assert_eq!(from.read_u64(at).unwrap(), to.read_u64(at).unwrap(), "{} {at:#x}", from.name());
        }
    }
}

#[test]
fn ring_stopped_reports_nothing_and_can_start_again() {
    let test = "ring_stopped_reports_nothing_and_can_start_again";
    let Some(mut machine) = machine(test, 150, 1) else { return };
    let mut found = DirtyBitmaps::new(&machine.ram);
    assert!(matches!(machine.ring.sync(&mut found), Err(DirtyError::NotStarted { .. })));
    machine.ring.start().unwrap();
    machine.ring.start().unwrap();
    machine.write(0, 10, 5);

    machine.ring.stop().unwrap();
    machine.ring.stop().unwrap();

    assert!(matches!(machine.ring.sync(&mut found), Err(DirtyError::NotStarted { .. })));
    let reported = machine.ring.reported();
    machine.write(0, 10, 100);
    machine.ring.poll().unwrap();
    assert_eq!(machine.ring.reported(), reported, "the slots log no more");
    machine.ring.start().unwrap();
    machine.write(0, 40, 1);
    assert_eq!(machine.sync(), [vec![45], vec![]]);
}

#[test]
fn ring_sizes_and_moments_that_cannot_be_are_refused() {
    let test = "ring_sizes_and_moments_that_cannot_be_are_refused";
    let Ok(kvm) = Kvm::new() else { return skipped(test, "no /dev/kvm") };
    let vm = kvm.create_vm().unwrap();
    let most = KvmDirtyRings::most_entries(fd(&vm));
    if most == 0 {
        return skipped(test, "the kernel has no dirty rings");
    }
    for entries in [0, 3, 8, 1000, most * 2] {
        match KvmDirtyRings::enable(owned(&vm), entries) {
            Err(DirtyError::RingSize { entries: said, most: offered }) => {
                assert_eq!((said, offered), (entries, most));
            }
            other => panic!("{entries}: {other:?}"),
        }
    }
    let _vcpu = vm.create_vcpu(0).unwrap();
    assert!(matches!(
        KvmDirtyRings::enable(owned(&vm), 1024),
        Err(DirtyError::System { call: "KVM_ENABLE_CAP", .. })
    ));
}

#[test]
fn ring_slots_are_replaced_between_migrations_alone() {
    let Some(mut machine) = machine("ring_slots_are_replaced_between_migrations_alone", 150, 1) else {
        return;
    };
    machine.ring.start().unwrap();
    machine.write(0, 225, 1); // page 5 of block 1
    // Memory is plugged: the guest has another block. Slot 7, which is block 1, moves to other guest addresses.
    let plugged = RamBlock::new("c", 10 * PAGE, Backing::Memfd).unwrap();
    let ram = GuestRam::new(machine.ram.blocks().iter().cloned().chain([plugged]).collect()).unwrap();
    let slots = vec![
        slot(0, 0, 0, 5, 150),
        slot(1, 150, 0, 155, 70),
        slot(7, 400, 1, 0, 100),
        slot(11, 330, 2, 0, 10),
    ];

    let while_running = machine.ring.replace_slots(slots.clone(), ram.clone());

    assert!(matches!(while_running, Err(DirtyError::Running { .. })), "{while_running:?}");
    assert!(machine.sync()[1].contains(&5), "the refusal changed nothing");
    machine.ring.stop().unwrap();
    machine.ram = ram.clone();
    slots[2..].iter().for_each(|slot| set_slot(&machine.vm, &machine.ram, slot));
    let outside = vec![slot(12, 500, 3, 0, 1)];
    let refused = machine.ring.replace_slots(outside, ram.clone());
    assert!(matches!(refused, Err(DirtyError::Slot { slot: 12, .. })), "{refused:?}");
    machine.ring.replace_slots(slots, ram).unwrap();

    machine.ring.start().unwrap();
    machine.write(0, 333, 2);
    machine.write(0, 409, 1);

    let mut found = DirtyBitmaps::new(&machine.ram);
    machine.ring.sync(&mut found).unwrap();
    for (block, page) in [(2, 3), (2, 4), (1, 9)] {
        assert!(found.block(block).get(page), "page {page} of block {block} was written");
    }
    if machine.ring.overruns() == 0 {
        assert_eq!(found.count(), 3);
    }
    assert_eq!(machine.ram.block(1).read_u64(9 * PAGE).unwrap() & 0xffff_ffff, 1, "the guest did write");
}
