//! Measures KVM's dirty log with a guest that writes random pages.
//!
//! The guest is ten instructions in long mode. Its code and its page tables (for pages of 2 MiB) are in a
//! small block after the memory that it writes. That memory is one slot, or several of 8 GiB. [`KvmDirtyLog`]
//! makes the slots when it starts.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use rustix::process::{ForeignRawFd, PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use sterna_ram::dirty::{KvmDirtyLog, KvmLogMode, KvmSlot};
use sterna_ram::{Backing, DirtyBitmaps, DirtySource, GuestRam, PAGE_SIZE, PageBitmap, RamBlock};

use super::table::{Table, time};
use super::{Args, Failed, skipped};

const ALONE: &str = "GET_DIRTY_LOG alone";
const SYNC: &str = "sync";
const REARM: &str = "re-arming (CLEAR_DIRTY_LOG and all)";
const CYCLE: &str = "sync and re-arming";
const CYCLE_ALONE: &str = "the same without the merging";

/// Writes the state of a generator into `count` (rsi) random pages. Registers: state rdi, its factor rbx,
/// mask of the page numbers r8.
const GUEST: &[u8] = &[
    0x48, 0x0f, 0xaf, 0xfb, // imul rdi, rbx
    0x48, 0xff, 0xc7, // inc rdi
    0x48, 0x89, 0xf8, // mov rax, rdi
    0x48, 0xc1, 0xe8, 0x1e, // shr rax, 30
    0x4c, 0x21, 0xc0, // and rax, r8
    0x48, 0xc1, 0xe0, 0x0c, // shl rax, 12
    0x48, 0x89, 0x38, // mov [rax], rdi
    0x48, 0xff, 0xce, // dec rsi
    0x75, 0xe3, // jnz to the start
    0xf4, // hlt
];

/// Pages of the block for two tables and the code. One more table for each GiB is added.
const BOOT_PAGES: u64 = 3;
/// Pages in a GiB.
const GIB_PAGES: u64 = 1 << 18;
/// Number of GiB that one table of 512 entries can address. Each entry is one GiB. One entry is the guest's
/// own block after its memory. Each entry is one GiB.
const MOST_GIB: u64 = 256;
const SLOT_PAGES: u64 = (8 << 30) / PAGE_SIZE as u64;

pub fn measure(args: &Args) -> Result<Vec<Table>, Failed> {
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            skipped("kvm", format!("/dev/kvm: {error}"));
            return Ok(Vec::new());
        }
    };
    if !args.guest.is_power_of_two() || args.guest > MOST_GIB {
        skipped(
            "kvm",
            format!("its guest needs a power of two of memory, at most {MOST_GIB} GiB: give --guest"),
        );
        return Ok(Vec::new());
    }
    let pages = (args.guest << 30) / PAGE_SIZE as u64;
    let layouts = [
        ("one slot", pages, 0),
        ("slots of 8 GiB", SLOT_PAGES.min(pages), 0),
        ("slots of 8 GiB, misaligned", SLOT_PAGES.min(pages), 13),
    ];
    let tables = layouts.iter().map(|(name, slot_pages, first)| table(args, &kvm, name, *slot_pages, *first));
    tables.filter_map(Result::transpose).collect()
}

fn table(
    args: &Args,
    kvm: &Kvm,
    name: &str,
    slot_pages: u64,
    first_page: u64,
) -> Result<Option<Table>, Failed> {
    let pages = (args.guest << 30) / PAGE_SIZE as u64;
    let mut machine = Machine::new(kvm, pages, slot_pages, first_page)?;
    let log = &machine.log;
    log.start()?;
    let mode = log.mode();
    if mode == Some(KvmLogMode::Automatic) {
        // GET would clear the log, so the system calls alone would leave nothing to sync.
        skipped("kvm", "this kernel's dirty log has no manual protection");
        return Ok(None);
    }
    let mut dirty = DirtyBitmaps::new(&machine.ram);
    log.sync(&mut dirty)?;
    rearm(log, &machine.ram, &dirty)?;
    let mut table =
        Table::new(format!("kvm: {} GiB, {name}, {} pages written, mode {mode:?}", args.guest, args.written));
    for run in 0..=args.runs {
        machine.write(args.written, pages - 1)?;
        let log = &machine.log;
        dirty.clear_all();
        // With manual protection, GET changes nothing, so both measurements read the same log.
        let mut times = [Duration::ZERO; 2];
        let mut newly = 0;
        for part in [run % 2, (run + 1) % 2] {
            times[part] = if part == 0 {
                let (took, done) = time(|| log.system_calls_alone());
                done?;
                took
            } else {
                let (took, report) = time(|| log.sync(&mut dirty));
                newly = report?.newly_dirty;
                took
            };
        }
        assert!(newly > args.written / 2 && newly == dirty.count(), "{newly} pages were synced");
        let (cleared, done) = time(|| rearm(log, &machine.ram, &dirty));
        done?;
        if run > 0 {
            table.push(ALONE, times[0]);
            table.push(SYNC, times[1]);
            table.push(REARM, cleared);
            table.push(CYCLE, times[1] + cleared);
            table.push(CYCLE_ALONE, times[0] + cleared);
        }
    }
    table.tell(SYNC, ALONE);
    table.tell(CYCLE, CYCLE_ALONE);
    Ok(Some(table))
}

/// Re-arms all synced pages, in slices as lanes do.
fn rearm(log: &KvmDirtyLog, ram: &GuestRam, synced: &DirtyBitmaps) -> Result<(), Failed> {
    const SLICE: u64 = 1 << 18;
    for (index, block) in ram.blocks().iter().enumerate() {
        let bits: &PageBitmap = synced.block(index);
        for first in (0..block.pages()).step_by(SLICE as usize) {
            log.rearm(index, first, SLICE.min(block.pages() - first), bits)?;
        }
    }
    Ok(())
}

struct Machine {
    ram: GuestRam,
    vcpu: VcpuFd,
    log: KvmDirtyLog,
    /// Address of the guest's code.
    code: u64,
    state: u64,
    _vm: VmFd,
}

impl Machine {
    fn new(kvm: &Kvm, pages: u64, slot_pages: u64, first_page: u64) -> Result<Self, Failed> {
        let page = PAGE_SIZE as u64;
        // One more GiB, for the block itself.
        let boot_pages = (BOOT_PAGES + pages / GIB_PAGES + 1).next_multiple_of(64);
        let blocks = vec![
            RamBlock::new("ram", (pages + 64) * page, Backing::Anonymous)?,
            RamBlock::new("boot", boot_pages * page, Backing::Anonymous)?,
        ];
        // With huge pages, each written page would allocate 2 MiB.
        blocks[0].advise_huge_pages(false)?;
        let ram = GuestRam::new(blocks)?;
        let mut slots: Vec<KvmSlot> = (0..pages / slot_pages)
            .map(|slot| KvmSlot {
                slot: slot as u32,
                guest_address: slot * slot_pages * page,
                first_page: first_page + slot * slot_pages,
                pages: slot_pages,
                ..KvmSlot::default()
            })
            .collect();
        let boot = pages * page;
        slots.push(KvmSlot {
            slot: slots.len() as u32,
            guest_address: boot,
            block: 1,
            pages: boot_pages,
            ..KvmSlot::default()
        });
        let vm = kvm.create_vm()?;
        let itself = pidfd_open(getpid(), PidfdFlags::empty())?;
        let duplicate: OwnedFd =
            pidfd_getfd(itself, vm.as_raw_fd() as ForeignRawFd, PidfdGetfdFlags::empty())?;
        let log = KvmDirtyLog::new(duplicate, slots, ram.clone())?;
        let code = write_boot(&ram, boot)?;
        let vcpu = vm.create_vcpu(0)?;
        vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
        enter_long_mode(&vcpu, boot)?;
        Ok(Machine { ram, vcpu, log, code, state: 1, _vm: vm })
    }

    /// Lets the guest write `count` pages; some are written twice.
    fn write(&mut self, count: u64, mask: u64) -> Result<(), Failed> {
        let regs = kvm_regs {
            rip: self.code,
            rflags: 2,
            rdi: self.state,
            rsi: count,
            rbx: 6_364_136_223_846_793_005,
            r8: mask,
            ..Default::default()
        };
        self.vcpu.set_regs(&regs)?;
        match self.vcpu.run()? {
            VcpuExit::Hlt => {}
            other => return Err(format!("the guest stopped with {other:?}").into()),
        }
        self.state = self.vcpu.get_regs()?.rdi;
        Ok(())
    }
}

/// Writes page tables that map all memory to itself, and the code. Returns the code's address.
fn write_boot(ram: &GuestRam, boot: u64) -> Result<u64, Failed> {
    let block = ram.block(1);
    let page = PAGE_SIZE as u64;
    // Flags: present and writable; in the last level also: a page of 2 MiB.
    block.write_u64(0, (boot + page) | 3)?;
    for gib in 0..=boot >> 30 {
        let table = (BOOT_PAGES + gib) * page;
        block.write_u64(page + gib * 8, (boot + table) | 3)?;
        for index in 0..512 {
            block.write_u64(table + index * 8, (gib << 30) | (index << 21) | 0x83)?;
        }
    }
    block.write(2 * page, GUEST)?;
    Ok(boot + 2 * page)
}

fn enter_long_mode(vcpu: &VcpuFd, tables: u64) -> Result<(), Failed> {
    let mut sregs = vcpu.get_sregs()?;
    let data = kvm_segment {
        limit: u32::MAX,
        selector: 16,
        type_: 3,
        present: 1,
        db: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    sregs.cs = kvm_segment { selector: 8, type_: 11, db: 0, l: 1, ..data };
    (sregs.ds, sregs.es, sregs.ss, sregs.fs, sregs.gs) = (data, data, data, data, data);
    sregs.cr3 = tables;
    sregs.cr4 = 1 << 5; // PAE
    sregs.cr0 = 1 << 31 | 1 << 5 | 1 << 4 | 1; // paging, numeric errors, extension type, protection
    sregs.efer = 1 << 8 | 1 << 10; // long mode, enabled and active
    vcpu.set_sregs(&sregs)?;
    Ok(())
}
