//! Puts a guest's first bytes into RAM and its vCPUs at its entry.

use kvm_bindings::{KVM_MP_STATE_RUNNABLE, kvm_mp_state, kvm_regs, kvm_segment};
use sterna_ram::GuestRam;

use crate::config::GuestImage;
use crate::error::VmmError;
use crate::hardware::Hardware;
use crate::layout::{self, BOOT_PARAMETERS, FLAT_ENTRY, GDT, GIB, HIGH_START, PAGE_TABLES, Range, STACKS};
use crate::vcpus::Vcpus;

const PAGE: u64 = 4096;
/// GiB that are mapped with 2 MiB pages; more take 1 GiB pages, or the tables would meet the stacks.
const SMALL_GIB_MAX: u64 = 64;
const PRESENT_WRITABLE: u64 = 0b11;
const LARGE: u64 = 1 << 7;
const CR0_FLAT: u64 = 0x8005_0033; // PG AM WP NE ET MP PE
const CR4_FLAT: u64 = 0x620; // OSXMMEXCPT OSFXSR PAE
const EFER_FLAT: u64 = 0x500; // LMA LME

/// Loads `image` and sets every vCPU up for it. The vCPUs are parked.
pub(super) fn load(hardware: &Hardware, vcpus: &Vcpus, image: &GuestImage) -> Result<(), VmmError> {
    match image {
        GuestImage::BootSector(code) => {
            hardware.vm.ram().block(0).write(layout::BOOT_SECTOR, code)?;
            start_real_mode(vcpus)
        }
        GuestImage::Flat64 { code, parameters } => {
            write_tables(hardware)?;
            write_parameters(hardware, vcpus.count(), code.len() as u64, parameters)?;
            hardware.vm.ram().block(0).write(FLAT_ENTRY, code)?;
            (0..vcpus.count()).try_for_each(|index| start_long_mode(vcpus, index))
        }
    }
}

fn start_real_mode(vcpus: &Vcpus) -> Result<(), VmmError> {
    let fd = vcpus.fd(0);
    let mut sregs = fd.get_sregs().map_err(|error| VmmError::kvm("KVM_GET_SREGS", "vcpu 0", error))?;
    for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.ss, &mut sregs.fs, &mut sregs.gs]
    {
        (segment.base, segment.selector) = (0, 0);
    }
    fd.set_sregs(&sregs).map_err(|error| VmmError::kvm("KVM_SET_SREGS", "vcpu 0", error))?;
    let regs = kvm_regs {
        rip: layout::BOOT_SECTOR,
        rsp: layout::BOOT_SECTOR,
        rdx: 0x80,
        rflags: 2,
        ..Default::default()
    };
    fd.set_regs(&regs).map_err(|error| VmmError::kvm("KVM_SET_REGS", "vcpu 0", error))
}

fn start_long_mode(vcpus: &Vcpus, index: usize) -> Result<(), VmmError> {
    let on = || format!("vcpu {index}");
    let fd = vcpus.fd(index);
    let mut sregs = fd.get_sregs().map_err(|error| VmmError::kvm("KVM_GET_SREGS", on(), error))?;
    sregs.cs = segment(0x08, 0b1011, true);
    let data = segment(0x10, 0b0011, false);
    (sregs.ds, sregs.es, sregs.ss, sregs.fs, sregs.gs) = (data, data, data, data, data);
    sregs.tr = kvm_segment { selector: 0x18, type_: 11, present: 1, limit: 0x67, ..Default::default() };
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, 5 * 8 - 1);
    (sregs.idt.base, sregs.idt.limit) = (0, 0);
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (CR0_FLAT, PAGE_TABLES, CR4_FLAT, EFER_FLAT);
    fd.set_sregs(&sregs).map_err(|error| VmmError::kvm("KVM_SET_SREGS", on(), error))?;
    let regs = kvm_regs {
        rip: FLAT_ENTRY,
        rsp: STACKS + (index as u64 + 1) * PAGE,
        rdi: index as u64,
        rsi: BOOT_PARAMETERS,
        rflags: 2,
        ..Default::default()
    };
    fd.set_regs(&regs).map_err(|error| VmmError::kvm("KVM_SET_REGS", on(), error))?;
    fd.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE })
        .map_err(|error| VmmError::kvm("KVM_SET_MP_STATE", on(), error))
}

fn segment(selector: u16, type_: u8, code: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        s: 1,
        g: 1,
        l: u8::from(code),
        db: u8::from(!code),
        ..Default::default()
    }
}

/// The GDT and an identity mapping of everything below the end of RAM, the hole included.
fn write_tables(hardware: &Hardware) -> Result<(), VmmError> {
    let low = hardware.vm.ram().block(0);
    // Null, 64-bit code, data, and a 16-byte busy task-state descriptor over address 0.
    for (index, word) in
        [0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x0000_8b00_0000_0067, 0].into_iter().enumerate()
    {
        low.write_u64(GDT + index as u64 * 8, word)?;
    }
    let end = hardware
        .vm
        .ranges()
        .iter()
        .map(|range| range.start + range.len_bytes)
        .max()
        .unwrap_or(0)
        .max(HIGH_START);
    let gib = end.div_ceil(GIB);
    let (directory, huge) = (PAGE_TABLES + PAGE, gib > SMALL_GIB_MAX);
    if gib > 512 || huge && !hardware.caps.gib_pages {
        let most = if hardware.caps.gib_pages { 512 } else { SMALL_GIB_MAX };
        let why = format!(
            "flat guests can address {most} GiB of guest-physical memory, but {gib} GiB are required"
        );
        return Err(VmmError::Config { what: "ram", why });
    }
    low.write_u64(PAGE_TABLES, directory | PRESENT_WRITABLE)?;
    for index in 0..gib {
        let table = directory + PAGE * (index + 1);
        let entry = if huge { (index * GIB) | LARGE } else { table };
        low.write_u64(directory + index * 8, entry | PRESENT_WRITABLE)?;
        for page in (0..512).take_while(|_| !huge) {
            low.write_u64(table + page * 8, (index * GIB + (page << 21)) | LARGE | PRESENT_WRITABLE)?;
        }
    }
    Ok(())
}

fn write_parameters(
    hardware: &Hardware,
    vcpus: usize,
    code_len: u64,
    parameters: &[u64],
) -> Result<(), VmmError> {
    let free = usable(hardware.vm.ranges(), code_len);
    let mut words = vec![layout::BOOT_MAGIC, layout::BOOT_VERSION, vcpus as u64];
    words.extend([hardware.tsc_khz.into(), free.len() as u64]);
    words.extend(free.iter().flat_map(|range| [range.start, range.len_bytes]));
    words.resize((layout::BOOT_PARAMETER_COUNT / 8) as usize, 0);
    words.push(parameters.len() as u64);
    words.extend(parameters);
    write_words(hardware.vm.ram(), BOOT_PARAMETERS, &words)
}

fn write_words(ram: &GuestRam, at: u64, words: &[u64]) -> Result<(), VmmError> {
    for (index, word) in words.iter().enumerate() {
        ram.block(0).write_u64(at + index as u64 * 8, *word)?;
    }
    Ok(())
}

/// RAM without what the machine put into it: low RAM from the first whole page after the code on.
fn usable(ranges: &[Range], code_len: u64) -> Vec<Range> {
    let taken = (FLAT_ENTRY + code_len).next_multiple_of(PAGE);
    let mut free = ranges.to_vec();
    free[0].start = taken;
    free[0].len_bytes -= taken;
    free
}
