//! Differences from the standby's pages, which a multifd lane sends (specs/extension.md §10).

use std::sync::Arc;

use parking_lot::Mutex;
use sterna_ram::PAGE_SIZE;
use sterna_wire::WireError;
use sterna_wire::multifd::{Method, RamPacketEncoder, push_difference};

use crate::outgoing::main_stream::MainStream;
use crate::outgoing::protection::{DeltaCache, Scratch};

/// Shared by the lanes of a protection to find differences.
pub(in crate::outgoing) struct SharedDeltas {
    pub cache: DeltaCache,
    /// The main channel, which knows the checkpoint that is being sent.
    pub main: Arc<Mutex<MainStream>>,
}

impl SharedDeltas {
    /// The number of the checkpoint that is being sent; `None` in the seeding.
    pub(super) fn checkpoint(&self) -> Option<u64> {
        self.main.lock().checkpoint()
    }
}

/// A lane's buffers for differences, and the packet of differences that is being filled.
pub(in crate::outgoing) struct Changes {
    pub(super) scratch: Scratch,
    pub(super) packet: DifferencePacket,
}

impl Changes {
    pub(super) fn new() -> Box<Self> {
        let packets = RamPacketEncoder::new(Method::None);
        let packet = DifferencePacket { packets, open: None, payload: Vec::new() };
        Box::new(Self { scratch: Scratch::default(), packet })
    }
}

pub(super) struct DifferencePacket {
    packets: RamPacketEncoder,
    open: Option<usize>,
    payload: Vec<u8>,
}

impl DifferencePacket {
    /// Whether the packet has room for a page of `block`.
    pub(super) fn has_room(&self, block: usize) -> bool {
        self.open.is_none_or(|open| open == block && !self.packets.is_full())
    }

    /// Adds a page, for which there is room.
    pub(super) fn push(
        &mut self,
        (block, name): (usize, &str),
        page: u64,
        delta: &[u8],
    ) -> Result<bool, WireError> {
        if self.open.is_none() {
            self.packets.begin(name)?;
            self.open = Some(block);
        }
        push_difference(delta, &mut self.payload)?;
        Ok(self.packets.push_normal(page * PAGE_SIZE as u64))
    }

    /// The packet's number of pages, and bytes of differences; `None` without pages.
    pub(super) fn waiting(&self) -> Option<(usize, usize)> {
        self.open.map(|_| (self.packets.normal_pages(), self.payload.len()))
    }

    /// Completes the packet: gives its header and its payload. The caller empties it with [`clear`](Self::clear).
    pub(super) fn finish(&mut self, number: u64) -> (&[u8], &[u8]) {
        let payload_bytes = self.payload.len() as u32;
        (&self.packets.finish_differences(number, payload_bytes)[..], &self.payload)
    }

    pub(super) fn clear(&mut self) {
        self.open = None;
        self.payload.clear();
    }
}
