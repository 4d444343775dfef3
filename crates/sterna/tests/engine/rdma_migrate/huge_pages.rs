//! Blocks on pages of 2 MiB: only complete huge pages are registered and given back.

use super::content::{finish, start_with};
use super::*;
use crate::plain::{Plain, byte_of};
use sterna::ram::{Backing, ExternalMemory, GuestRam, MemoryPermissions, PAGE_SIZE, RamBlock};

const HUGE: u64 = 2 * MIB;
const GUEST: u64 = 24 * MIB;
const PAGES: u64 = GUEST / PAGE_SIZE as u64;

/// Memory on the host's huge pages, if the host has reserved any. Otherwise normal memory that is declared as huge
/// pages. The block begins in the middle of a huge page, as a VMM's block may.
fn ram() -> GuestRam {
    let block = RamBlock::new("ram", GUEST, Backing::Huge2M).unwrap_or_else(|_| {
        let below = RamBlock::new("below", GUEST + 2 * HUGE, Backing::Anonymous).unwrap();
        let first = below.host_address() as u64;
        let inside = first.next_multiple_of(HUGE) + MIB - first;
        let memory =
            ExternalMemory::new(below.host_address().wrapping_add(inside as usize), GUEST, Arc::new(below))
                .huge_pages(HUGE)
                .permit(MemoryPermissions::none().allow_discard());
        // SAFETY: the bytes lie inside the mapping of `below`, which the block keeps alive, and no other object uses
        // them.
        unsafe { RamBlock::from_external("ram", memory) }.unwrap()
    });
    assert_eq!(block.page_bytes(), HUGE);
    GuestRam::new(vec![block]).unwrap()
}

#[test]
fn guest_on_huge_pages_moves_with_windows_and_on_demand_with_and_without_lanes() {
    for (lanes, on_demand_paging, limit) in [
        (0, false, None),
        (0, false, Some(4 * MIB)),
        (2, false, Some(4 * MIB)),
        (0, true, None),
        (2, true, None),
    ] {
        let what = format!("{lanes} lanes, on demand: {on_demand_paging}, limit {limit:?}");
        println!("{what}");
        let mut settings = Settings::seeded(91);
        settings.on_demand_paging = on_demand_paging;
        let lab = Lab::new(settings);
        let [source, target] = [(); 2].map(|()| Plain::new(ram()));
        let mut random = fastrand::Rng::with_seed(91);
        // Short runs of data and zeros: most windows begin and end inside a huge page.
        let bytes: Vec<u8> =
            (0..PAGES).map(|page| if page / 37 % 3 == 0 { random.u8(1..) } else { 0 }).collect();
        (0..PAGES)
            .zip(&bytes)
            .filter(|(_, byte)| **byte > 0)
            .for_each(|(page, byte)| source.write(page, *byte));
        // Content of an earlier guest.
        (0..PAGES).for_each(|page| target.write(page, 0xa5));
        source
            .at_last(|guest| (0..PAGES / 2).step_by(3).for_each(|page| guest.write(page, (page % 5) as u8)));

        let limited = |params: &mut Parameters| params.rdma.pinned_limit_bytes = limit;
        let (migration, incoming) = start_with(&lab, &source, &target, lanes, limited);
        finish(migration, incoming);

        for (page, byte) in (0..PAGES).zip(&bytes) {
            let last = if page < PAGES / 2 && page % 3 == 0 { (page % 5) as u8 } else { *byte };
            assert_eq!(byte_of(&target.ram, page), last, "{what}: page {page}");
        }
        drop((source, target));
        lab.assert_empty();
    }
}
