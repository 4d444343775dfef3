//! The memory of a guest that this process runs itself.

use std::error::Error;
use std::fmt;
use std::sync::{Arc, Weak};

use sterna_ram::missing_pages::MissingPagesError;
use sterna_ram::peer_memory::PeerMemory;
use sterna_ram::{Filling, GuestRam, Hurry, PAGE_SHIFT, RamBlock};

use crate::error::{GuestError, PagerError};
use crate::fill_order::FillOrder;
use crate::guest::Guest;
use crate::handshake::{Handshake, Region};
use crate::owner::{OwnEvents, Owner};
use crate::source::{HUGE_BYTES, PAGE_BYTES};

/// Guest RAM of this process that is served from an image.
pub struct OwnGuest {
    /// Name of the guest, for messages.
    pub name: String,
    /// The RAM, which is empty.
    pub ram: GuestRam,
    /// For each block the offset in the image's memory at which it begins. The blocks are all of that memory.
    pub offsets: Vec<u64>,
    /// What follows when the memory is complete, or cannot be completed.
    pub events: Arc<dyn OwnEvents>,
}

/// The offset and the length of each block in the image's memory, after a check that they are all of it.
pub(crate) fn starts(guest: &OwnGuest, memory_bytes: u64) -> Result<Vec<u64>, PagerError> {
    let blocks = guest.ram.blocks();
    let mut order: Vec<usize> = (0..blocks.len().min(guest.offsets.len())).collect();
    order.sort_by_key(|index| guest.offsets[*index]);
    let mut end = 0;
    for index in &order {
        if guest.offsets[*index] != end {
            return Err(PagerError::OtherMemory { block: blocks[*index].name().to_owned() });
        }
        end += blocks[*index].len_bytes();
    }
    if end == memory_bytes && guest.offsets.len() == blocks.len() {
        return Ok(guest.offsets.clone());
    }
    let block = blocks.last().map_or_else(String::new, |block| block.name().to_owned());
    Err(PagerError::OtherMemory { block })
}

/// Registers the memory, so that an access to a missing page waits.
pub(crate) fn register(guest: OwnGuest, starts: &[u64]) -> Result<Guest, PagerError> {
    for block in guest.ram.blocks() {
        check_pages(block.name(), block.page_bytes())?;
    }
    let memory = PeerMemory::of_own(&guest.ram)?;
    let region = |(block, offset): (&RamBlock, &u64)| Region {
        address: block.host_address() as u64,
        bytes: block.len_bytes(),
        offset: *offset,
    };
    let mut regions: Vec<_> = guest.ram.blocks().iter().zip(starts).map(region).collect();
    regions.sort_by_key(|region| region.offset);
    let page_bytes = guest.ram.blocks().iter().map(RamBlock::page_bytes).max().unwrap_or(PAGE_BYTES);
    let events = Completion { events: guest.events, ram: guest.ram };
    let owner = Owner::Own(Arc::new(events));
    Ok(Guest::new(Handshake { regions, page_bytes }, memory, owner, guest.name))
}

/// Refuses pages that cannot be placed whole.
fn check_pages(block: &str, page_bytes: u64) -> Result<(), PagerError> {
    if page_bytes <= HUGE_BYTES {
        return Ok(());
    }
    let rule = "its pages have 1 GiB, and at most 2 MiB are placed at a time: use huge pages of 2 MiB, or load it before the \
                guest runs";
    Err(MissingPagesError::Refused { block: block.to_owned(), rule }.into())
}

/// States that pages of the blocks are still missing.
pub(crate) fn begin(guest: &Arc<Guest>, blocks: &[RamBlock], starts: &[u64], order: &Arc<FillOrder>) {
    for (block, offset) in blocks.iter().zip(starts) {
        let (guest, order) = (Arc::downgrade(guest), Arc::clone(order));
        block.begin_filling(Arc::new(Part { guest, order, first: offset >> PAGE_SHIFT }));
    }
}

/// Ends the statement that pages are missing, before the guest's owner learns that none is.
struct Completion {
    events: Arc<dyn OwnEvents>,
    ram: GuestRam,
}

impl OwnEvents for Completion {
    fn completed(&self) {
        self.ram.blocks().iter().for_each(RamBlock::end_filling);
        self.events.completed();
    }

    fn given_up(&self, why: &GuestError) {
        self.events.given_up(why);
    }
}

/// The pages of one block among those of the guest.
struct Part {
    guest: Weak<Guest>,
    order: Arc<FillOrder>,
    /// Number of the block's first page of 4 KiB in the image's memory.
    first: u64,
}

impl Filling for Part {
    fn owed(&self, first: u64, count: u64, owed: &mut dyn FnMut(u64, u64)) {
        match self.guest.upgrade() {
            Some(guest) => guest.missing_small(self.first + first, count, &mut |first, count| {
                owed(first - self.first, count);
            }),
            // The pager has ended, and with it the guest.
            None => owed(first, count),
        }
    }

    fn given_back(&self, first: u64, count: u64) {
        if let Some(guest) = self.guest.upgrade() {
            guest.give_back(self.first + first, count);
            if guest.is_complete() {
                self.order.look_again();
            }
        }
    }

    fn hurry(&self) -> Box<dyn Hurry> {
        let (guest, order) = (self.guest.clone(), Arc::clone(&self.order));
        Box::new(FullSpeed { seen: order.hurry(), guest, order })
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Part").field("first", &self.first).finish_non_exhaustive()
    }
}

/// The fill without pauses, for an operation that needs all of the memory.
struct FullSpeed {
    guest: Weak<Guest>,
    order: Arc<FillOrder>,
    /// Number of frames that the fill could not read before.
    seen: u64,
}

impl Hurry for FullSpeed {
    fn obstacle(&self) -> Option<Arc<dyn Error + Send + Sync>> {
        let ended = self.guest.upgrade().map_or(Some(GuestError::Stopped), |guest| guest.failure());
        let why = ended.map(Arc::new).or_else(|| self.order.obstacle_after(self.seen))?;
        Some(why)
    }
}

impl Drop for FullSpeed {
    fn drop(&mut self) {
        self.order.calm();
    }
}

impl fmt::Debug for FullSpeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FullSpeed").field("seen", &self.seen).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_1_gib_are_refused_with_the_rule_and_smaller_ones_are_not() {
        for page_bytes in [PAGE_BYTES, HUGE_BYTES] {
            check_pages("ram", page_bytes).unwrap();
        }
        let refused = check_pages("ram", 1 << 30).unwrap_err();
        let PagerError::Memory(MissingPagesError::Refused { block, rule }) = &refused else {
            panic!("{refused:?}");
        };
        assert_eq!(block, "ram");
        assert!(rule.contains("1 GiB") && rule.contains("2 MiB"), "{rule}");
    }
}
