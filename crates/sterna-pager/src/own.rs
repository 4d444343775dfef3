//! The memory of a guest that this process runs itself.

use std::fmt;
use std::sync::{Arc, Weak};

use sterna_ram::missing_pages::MissingPagesError;
use sterna_ram::peer_memory::PeerMemory;
use sterna_ram::{Filling, GuestRam, PAGE_SHIFT, RamBlock};

use crate::error::{GuestError, PagerError};
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
    let large = guest.ram.blocks().iter().find(|block| block.page_bytes() > HUGE_BYTES);
    if let Some(block) = large {
        let rule = "its pages have 1 GiB, and at most 2 MiB are placed at a time: use huge pages of 2 MiB, or load it \
                    before the guest runs";
        return Err(MissingPagesError::Refused { block: block.name().to_owned(), rule }.into());
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

/// States that pages of the blocks are still missing.
pub(crate) fn begin(guest: &Arc<Guest>, blocks: &[RamBlock], starts: &[u64]) {
    for (block, offset) in blocks.iter().zip(starts) {
        let guest = Arc::downgrade(guest);
        block.begin_filling(Arc::new(Part { guest, first: offset >> PAGE_SHIFT }));
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
        }
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Part").field("first", &self.first).finish_non_exhaustive()
    }
}
