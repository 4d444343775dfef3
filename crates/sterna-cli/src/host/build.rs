//! What both machines need while they are built.

use crate::exit::Stop;

/// The blocks of guest RAM: memory below the hole under 4 GiB, and the rest.
pub(super) fn blocks(ram_bytes: u64) -> Vec<(String, u64)> {
    sterna_vmm::layout::ranges(ram_bytes)
        .iter()
        .map(|range| {
            let name = [sterna_vmm::layout::LOW_BLOCK, sterna_vmm::layout::HIGH_BLOCK][range.block];
            (name.to_owned(), range.len_bytes)
        })
        .collect()
}

pub(super) fn cannot_build(machine: &str, why: impl std::fmt::Display) -> Stop {
    Stop::failed(format!("cannot build the {machine} machine: {why}"))
}
