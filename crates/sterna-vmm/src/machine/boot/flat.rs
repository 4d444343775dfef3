//! Loads and starts flat 64-bit code as described in [`crate::layout`].

use kvm_bindings::kvm_regs;
use sterna_ram::GuestRam;

use super::PAGE;
use super::long_mode::{self, CodeSelector};
use crate::error::VmmError;
use crate::hardware::Hardware;
use crate::layout::{self, BOOT_PARAMETERS, FLAT_ENTRY, Range, STACKS};
use crate::vcpus::Vcpus;

const CODE: CodeSelector = CodeSelector(0x08);

/// Loads the code and starts every vCPU at its first byte.
pub(super) fn load(
    hardware: &Hardware,
    vcpus: &Vcpus,
    code: &[u8],
    parameters: &[u64],
) -> Result<(), VmmError> {
    long_mode::write_tables(hardware, CODE)?;
    write_parameters(hardware, vcpus.count(), code.len() as u64, parameters)?;
    hardware.vm.ram().block(0).write(FLAT_ENTRY, code)?;
    (0..vcpus.count()).try_for_each(|index| {
        let regs = kvm_regs {
            rip: FLAT_ENTRY,
            rsp: STACKS + (index as u64 + 1) * PAGE,
            rdi: index as u64,
            rsi: BOOT_PARAMETERS,
            ..Default::default()
        };
        long_mode::start(vcpus, index, CODE, regs)
    })
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

/// RAM that the guest may use, from the first whole page after the code. High RAM is included.
fn usable(ranges: &[Range], code_len: u64) -> Vec<Range> {
    let taken = (FLAT_ENTRY + code_len).next_multiple_of(PAGE);
    let mut free = ranges.to_vec();
    free[0].start = taken;
    free[0].len_bytes -= taken;
    free
}
