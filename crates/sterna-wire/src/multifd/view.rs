//! Reads RAM packets in place (`specs/stream.md §3.4`).
//!
//! [`RamPacketView::decode`] makes every check once. The view then reads offsets from the received bytes on
//! demand. Each offset is page-aligned, inside its block and unique in the packet.

use super::blocks::BlockTable;
use super::differences::{self, MOST_BYTES};
use super::layout::RAM_PACKET_BYTES;
use super::packet::{Method, PacketHeader, PacketKind};
use crate::error::WireError;
use crate::limits::{COMPRESSED_PAYLOAD_BYTES, PACKET_PAGES};
use crate::{PAGE_SHIFT, PAGE_SIZE};

const MESSAGE: &str = "multifd RAM packet";
const SPEC: &str = "specs/stream.md §3.4";
const OFFSETS: usize = 320;

/// A checked RAM packet that borrows the received bytes.
#[derive(Debug, Clone, Copy)]
pub struct RamPacketView<'a> {
    sync: bool,
    differences: bool,
    method: Method,
    pages_alloc: u32,
    number: u64,
    payload_bytes: u32,
    block: Option<usize>,
    normal: &'a [u8],
    zero: &'a [u8],
}

impl<'a> RamPacketView<'a> {
    /// Checks the packet `bytes`. `method` is the compression that this side expects.
    ///
    /// # Errors
    /// Any broken rule of §3.4 and §9:
    ///
    /// - counts, method, payload length
    /// - block, alignment and range of the offsets
    /// - a page that occurs twice
    pub fn decode(
        bytes: &'a [u8; RAM_PACKET_BYTES],
        table: &BlockTable,
        method: Method,
    ) -> Result<Self, WireError> {
        // The array has more than twelve bytes, so the header is never incomplete.
        let Some(PacketHeader { kind: PacketKind::Ram { method: stated, sync, differences } }) =
            PacketHeader::peek(bytes)?
        else {
            return Err(bad(8, "DEVICE_STATE instead of a RAM packet"));
        };
        let pages_alloc = word(bytes, 12);
        let normal = word(bytes, 16) as usize;
        let payload_bytes = word(bytes, 20);
        let number = u64::from(word(bytes, 24)) << 32 | u64::from(word(bytes, 28));
        let zero = word(bytes, 32) as usize;

        if pages_alloc as usize > PACKET_PAGES {
            return Err(bad(12, format!("room for {pages_alloc} pages, more than {PACKET_PAGES}")));
        }
        if normal > pages_alloc as usize {
            return Err(bad(16, format!("{normal} normal pages in a packet with room for {pages_alloc}")));
        }
        if zero > pages_alloc as usize - normal {
            return Err(bad(
                32,
                format!("{normal} normal and {zero} zero pages in a packet with room for {pages_alloc}"),
            ));
        }
        if bytes[36..64].iter().any(|byte| *byte != 0) {
            return Err(bad(36, "a reserved byte is not zero"));
        }
        // An old QEMU repeats the payload length of the previous packet here. No payload follows a packet without
        // pages.
        let payload_bytes = if normal == 0 { 0 } else { payload_bytes };
        if differences {
            check_differences(normal, zero, payload_bytes)?;
        } else {
            check_method(stated, method, normal)?;
            check_payload(method, normal, payload_bytes)?;
        }

        let split = OFFSETS + 8 * normal;
        let view = Self {
            sync,
            differences,
            method,
            pages_alloc,
            number,
            payload_bytes,
            block: match normal + zero {
                0 => None,
                _ => Some(find_block(bytes, table)?),
            },
            normal: &bytes[OFFSETS..split],
            zero: &bytes[split..split + 8 * zero],
        };
        if let Some(block) = view.block {
            view.check_offsets(table, block)?;
        }
        Ok(view)
    }

    /// Whether this is the SYNC of a round.
    ///
    /// QEMU up to 8.0 puts pages into it. They belong to the round that ends.
    pub fn is_sync(&self) -> bool {
        self.sync
    }

    /// Whether the payload has [`Differences`](super::Differences).
    ///
    /// The caller must refuse such a packet unless it agreed to differences.
    pub fn holds_differences(&self) -> bool {
        self.differences
    }

    /// Compression of the payload, unless it has differences.
    pub fn method(&self) -> Method {
        self.method
    }

    /// Room for pages that the sender states: 128, or 0 in a SYNC.
    ///
    /// An old QEMU states 128 in a SYNC, too.
    pub fn pages_alloc(&self) -> u32 {
        self.pages_alloc
    }

    /// The sender's packet count over all channels.
    pub fn packet_number(&self) -> u64 {
        self.number
    }

    /// Length of the payload that follows the packet, in bytes.
    pub fn payload_bytes(&self) -> usize {
        self.payload_bytes as usize
    }

    /// Index of the pages' block in the table; `None` without pages.
    pub fn block(&self) -> Option<usize> {
        self.block
    }

    /// Offsets in the block of the pages in the payload, in the payload's order.
    pub fn normal(&self) -> Offsets<'a> {
        Offsets { bytes: self.normal }
    }

    /// Offsets in the block of the zero pages.
    pub fn zero(&self) -> Offsets<'a> {
        Offsets { bytes: self.zero }
    }

    /// Runs of adjacent normal pages, in the payload's order. Each run is one `readv` part.
    pub fn normal_runs(&self) -> Runs<'a> {
        Runs { offsets: self.normal() }
    }

    /// Runs of adjacent zero pages.
    pub fn zero_runs(&self) -> Runs<'a> {
        Runs { offsets: self.zero() }
    }

    fn check_offsets(&self, table: &BlockTable, block: usize) -> Result<(), WireError> {
        let pages = table.length_bytes(block) >> PAGE_SHIFT;
        let mut seen = PageSet::default();
        for (index, offset) in self.normal().chain(self.zero()).enumerate() {
            let page = offset >> PAGE_SHIFT;
            let at = OFFSETS + 8 * index;
            if offset % PAGE_SIZE as u64 != 0 {
                return Err(bad(at, format!("offset {offset:#x} is not a multiple of {PAGE_SIZE}")));
            }
            if page >= pages {
                let name = table.name(block);
                return Err(bad(at, format!("offset {offset:#x} is beyond the end of block {name:?}")));
            }
            if !seen.insert(page) {
                return Err(bad(at, format!("offset {offset:#x} occurs twice in one packet")));
            }
        }
        Ok(())
    }
}

/// Iterator over the offsets of a checked packet, in bytes.
#[derive(Debug, Clone)]
pub struct Offsets<'a> {
    bytes: &'a [u8],
}

impl Iterator for Offsets<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let (first, rest) = self.bytes.split_first_chunk::<8>()?;
        self.bytes = rest;
        Some(u64::from_be_bytes(*first))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.bytes.len() / 8;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Offsets<'_> {}

/// A run of adjacent pages in one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    /// Offset of the first page in its block, in bytes.
    pub offset: u64,
    /// Number of pages in the run.
    pub pages: usize,
}

/// Iterator over the runs of a checked packet.
#[derive(Debug, Clone)]
pub struct Runs<'a> {
    offsets: Offsets<'a>,
}

impl Iterator for Runs<'_> {
    type Item = PageRun;

    fn next(&mut self) -> Option<PageRun> {
        let offset = self.offsets.next()?;
        let mut run = PageRun { offset, pages: 1 };
        loop {
            let mut ahead = self.offsets.clone();
            // The addition cannot overflow, because checked offsets lie in a block whose length fits 64 bits.
            if ahead.next() != Some(offset + ((run.pages as u64) << PAGE_SHIFT)) {
                return Some(run);
            }
            self.offsets = ahead;
            run.pages += 1;
        }
    }
}

/// Page numbers of one packet, to find a page that occurs twice.
///
/// Open addressing, with twice as many slots as a packet can fill. A peer that makes all page numbers collide
/// sends 1344 bytes and causes about 8,000 comparisons.
struct PageSet {
    slots: [u64; 2 * PACKET_PAGES],
}

impl Default for PageSet {
    fn default() -> Self {
        Self { slots: [0; 2 * PACKET_PAGES] }
    }
}

impl PageSet {
    /// Adds a page. Returns `false` if the set contains the page already.
    fn insert(&mut self, page: u64) -> bool {
        let mask = self.slots.len() - 1;
        let mut slot = page.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(8) as usize & mask;
        // 0 marks a free slot. Adding 1 cannot overflow, because a page number is an offset shifted right.
        while self.slots[slot] != 0 {
            if self.slots[slot] == page + 1 {
                return false;
            }
            slot = (slot + 1) & mask;
        }
        self.slots[slot] = page + 1;
        true
    }
}

fn check_differences(normal: usize, zero: usize, payload: u32) -> Result<(), WireError> {
    let bad = |offset, rule: String| WireError::misbehaved(MESSAGE, offset, differences::SPEC, rule);
    if zero != 0 {
        return Err(bad(32, format!("{zero} zero pages in a packet of differences")));
    }
    if normal == 0 {
        return Err(bad(16, "a packet of differences without pages".to_owned()));
    }
    if payload == 0 || payload as usize > MOST_BYTES {
        return Err(bad(20, format!("{payload} bytes of differences, not 1 to {MOST_BYTES}")));
    }
    Ok(())
}

fn check_method(stated: Method, expected: Method, normal: usize) -> Result<(), WireError> {
    // A packet without normal pages may have the bits or not. A SYNC does not have them, a packet of zero pages
    // does.
    if stated == expected || (normal == 0 && stated == Method::None) {
        return Ok(());
    }
    let rule = format!(
        "compressed with {}, not {}: use the same multifd compression on both sides",
        stated.name(),
        expected.name()
    );
    Err(WireError::incompatible(MESSAGE, 8, SPEC, rule))
}

fn check_payload(method: Method, normal: usize, payload: u32) -> Result<(), WireError> {
    let payload = payload as usize;
    match (normal, method) {
        (0, _) => Ok(()),
        (_, Method::None) if payload != normal * PAGE_SIZE => {
            Err(bad(20, format!("{payload} bytes of payload for {normal} pages of {PAGE_SIZE}")))
        }
        (_, Method::None) => Ok(()),
        (_, _) if payload == 0 => Err(bad(20, format!("no payload for {normal} pages"))),
        (_, _) if payload > COMPRESSED_PAYLOAD_BYTES => {
            Err(bad(20, format!("{payload} bytes of payload, more than {COMPRESSED_PAYLOAD_BYTES}")))
        }
        _ => Ok(()),
    }
}

fn find_block(bytes: &[u8; RAM_PACKET_BYTES], table: &BlockTable) -> Result<usize, WireError> {
    let field = &bytes[64..OFFSETS];
    let Some(length) = field.iter().position(|byte| *byte == 0) else {
        return Err(bad(64, "the block name does not end in NUL"));
    };
    table.find(&field[..length]).ok_or_else(|| {
        let name = String::from_utf8_lossy(&field[..length]);
        WireError::incompatible(MESSAGE, 64, SPEC, format!("no RAM block has the name {name:?}"))
    })
}

fn word(bytes: &[u8; RAM_PACKET_BYTES], at: usize) -> u32 {
    let mut out = [0; 4];
    out.copy_from_slice(&bytes[at..at + 4]);
    u32::from_be_bytes(out)
}

#[cold]
fn bad(offset: usize, rule: impl Into<std::borrow::Cow<'static, str>>) -> WireError {
    WireError::misbehaved(MESSAGE, offset as u64, SPEC, rule)
}
