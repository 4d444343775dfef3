//! The layout of RAM in the guest's address space, and its division among vCPUs.

use sterna_ram::PAGE_SIZE;

use super::{FIRST_SWEPT, LOAD_ADDRESS, MOST_VCPUS, TideConfig, TideError};
use crate::model::{Acts, Segment, Share, share};

const PAGE: u64 = PAGE_SIZE as u64;

/// A block of RAM and its guest-physical address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamRange {
    /// Index of the block in [`sterna_ram::GuestRam`].
    pub block: usize,
    /// Guest-physical address of the block's first byte.
    pub guest_address: u64,
    /// Length of the block in bytes.
    pub len_bytes: u64,
}

/// The RAM of a PC in sterna-vmm's layout.
///
/// Block 0 begins at 0 and has at most 3 GiB. The rest is block 1, which begins at 4 GiB.
pub fn pc_ranges(ram_bytes: u64) -> Vec<RamRange> {
    const HOLE: u64 = 3 << 30;
    let low = RamRange { block: 0, guest_address: 0, len_bytes: ram_bytes.min(HOLE) };
    let high = RamRange { block: 1, guest_address: 4 << 30, len_bytes: ram_bytes.saturating_sub(HOLE) };
    if high.len_bytes == 0 { vec![low] } else { vec![low, high] }
}

/// Divides the swept RAM among vCPUs. Checks every assumption of the guest's code.
pub(super) fn shares(config: &TideConfig, ranges: &[RamRange]) -> Result<Vec<Share>, TideError> {
    let refuse = |why: String| Err(TideError::Config(why));
    if config.vcpus == 0 || config.vcpus > MOST_VCPUS {
        return refuse(format!("{} vCPUs; it serves 1 to {MOST_VCPUS}", config.vcpus));
    }
    if config.working_set_pages == Some(0) {
        return refuse("a working set has at least one page".into());
    }
    if Acts::new(config.zero_of_256, 0, 0).is_none() {
        return refuse(format!("{} of 256 steps store zeros; at most 192 may", config.zero_of_256));
    }
    let (Some(first), 1..=2) = (ranges.first(), ranges.len()) else {
        return refuse(format!("RAM lies in {} ranges; it handles 1 or 2", ranges.len()));
    };
    if first.guest_address > LOAD_ADDRESS || first.guest_address + first.len_bytes < FIRST_SWEPT {
        return refuse(format!(
            "the first range of RAM does not cover {LOAD_ADDRESS:#x} to {FIRST_SWEPT:#x}"
        ));
    }
    if ranges.windows(2).any(|pair| pair[1].guest_address < pair[0].guest_address + pair[0].len_bytes) {
        return refuse("the ranges of RAM do not ascend".into());
    }
    if ranges.iter().any(|range| !(range.guest_address | range.len_bytes).is_multiple_of(PAGE)) {
        return refuse("a range of RAM is not made of whole pages".into());
    }
    let swept: Vec<_> = ranges
        .iter()
        .map(|range| {
            let first_page = FIRST_SWEPT.saturating_sub(range.guest_address).min(range.len_bytes) / PAGE;
            Segment { block: range.block, first_page, pages: range.len_bytes / PAGE - first_page }
        })
        .collect();
    let shares = share::divide_segments(&swept, config.vcpus);
    if shares.iter().any(|share| share.pages() == 0) {
        return refuse(format!("there is not a page above {FIRST_SWEPT:#x} for each vCPU"));
    }
    Ok(shares)
}

/// Guest-physical address of a segment's first page.
pub(super) fn guest_address(ranges: &[RamRange], segment: &Segment) -> u64 {
    let range = ranges.iter().find(|range| range.block == segment.block);
    range.map_or(0, |range| range.guest_address) + segment.first_page * PAGE
}
