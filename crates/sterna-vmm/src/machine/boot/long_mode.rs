//! Prepares a vCPU that starts in long mode: GDT, page tables and registers.

use kvm_bindings::{KVM_MP_STATE_RUNNABLE, kvm_mp_state, kvm_regs, kvm_segment};

use super::PAGE;
use crate::error::VmmError;
use crate::hardware::Hardware;
use crate::layout::{GDT, GIB, HIGH_START, PAGE_TABLES};
use crate::vcpus::Vcpus;

/// GiB that are mapped with 2 MiB pages. More RAM takes 1 GiB pages, because the tables would reach the data
/// above them.
const SMALL_GIB_MAX: u64 = 64;
const PRESENT_WRITABLE: u64 = 0b11;
const LARGE: u64 = 1 << 7;
const CR0: u64 = 0x8005_0033; // PG AM WP NE ET MP PE
const CR4: u64 = 0x620; // OSXMMEXCPT OSFXSR PAE
const EFER: u64 = 0x500; // LMA LME
const CODE: u64 = 0x00af_9b00_0000_ffff;
const DATA: u64 = 0x00cf_9300_0000_ffff;
/// A 16-byte descriptor of a busy task-state segment at address 0.
const TASK: [u64; 2] = [0x0000_8b00_0000_0067, 0];

/// Selector of the code segment. The data segment and the task state follow it in the GDT.
#[derive(Debug, Clone, Copy)]
pub(super) struct CodeSelector(pub(super) u16);

impl CodeSelector {
    fn gdt(self) -> Vec<u64> {
        let mut words = vec![0; usize::from(self.0 / 8)];
        words.extend([CODE, DATA].into_iter().chain(TASK));
        words
    }
}

/// Starts a vCPU in long mode at `regs`, with interrupts off. [`write_tables`] must have been called.
pub(super) fn start(vcpus: &Vcpus, index: usize, code: CodeSelector, regs: kvm_regs) -> Result<(), VmmError> {
    let on = || format!("vcpu {index}");
    let fd = vcpus.fd(index);
    let mut sregs = fd.get_sregs().map_err(|error| VmmError::kvm("KVM_GET_SREGS", on(), error))?;
    sregs.cs = segment(code.0, 0b1011, true);
    let data = segment(code.0 + 8, 0b0011, false);
    (sregs.ds, sregs.es, sregs.ss, sregs.fs, sregs.gs) = (data, data, data, data, data);
    sregs.tr =
        kvm_segment { selector: code.0 + 16, type_: 11, present: 1, limit: 0x67, ..Default::default() };
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, code.gdt().len() as u16 * 8 - 1);
    (sregs.idt.base, sregs.idt.limit) = (0, 0);
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (CR0, PAGE_TABLES, CR4, EFER);
    fd.set_sregs(&sregs).map_err(|error| VmmError::kvm("KVM_SET_SREGS", on(), error))?;
    let regs = kvm_regs { rflags: 2, ..regs };
    fd.set_regs(&regs).map_err(|error| VmmError::kvm("KVM_SET_REGS", on(), error))?;
    fd.set_mp_state(kvm_mp_state { mp_state: KVM_MP_STATE_RUNNABLE })
        .map_err(|error| VmmError::kvm("KVM_SET_MP_STATE", on(), error))
}

/// Writes the GDT and an identity mapping up to the end of RAM. The hole is mapped too.
pub(super) fn write_tables(hardware: &Hardware, code: CodeSelector) -> Result<(), VmmError> {
    let low = hardware.vm.ram().block(0);
    for (index, word) in code.gdt().into_iter().enumerate() {
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
            "guests that start in long mode can address {most} GiB of guest-physical memory, but {gib} GiB are required"
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
