//! Checks of RDMA messages against the guest's blocks (`specs/rdma.md §4`, `§8`).
//!
//! A record alone does not show whether its index, key, address and range are valid.

use super::chunk::ChunkSize;
use super::private_data::Registration;
use super::records::{
    BlockPlace, Record, Records, RegisterRequest, RegisterResult, UnregisterRequest, ZeroRange,
};
use crate::error::WireError;
use crate::limits::BLOCKS;

const BLOCKS_SPEC: &str = "specs/rdma.md §4.1";

/// The address of every block at the destination, which both sides know after RAM_BLOCKS_RESULT.
///
/// The destination checks the source's requests with it, and the source checks the destination's answers. In
/// all checks `at` is the record's position in its message, from [`Records::iter`]. Errors add the position of
/// the field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockPlaces {
    places: Vec<BlockPlace>,
}

/// A byte range inside one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockRange {
    /// Index of the block in the block list.
    pub block: usize,
    /// Offset of the first byte in the block.
    pub start: u64,
    /// Length of the range, in bytes.
    pub length: u64,
}

impl BlockRange {
    /// Offset in the block of the byte after the range.
    pub fn end(&self) -> u64 {
        self.start + self.length
    }
}

impl BlockPlaces {
    /// The blocks of a destination, which it sends to the source.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for more than [`BLOCKS`] blocks, and for a block whose addresses
    /// or offsets do not fit 64 bits.
    pub fn new(places: Vec<BlockPlace>) -> Result<Self, WireError> {
        let local = |rule| WireError::local(BlockPlace::TYPE.name(), 0, BLOCKS_SPEC, rule);
        if places.len() > BLOCKS {
            return Err(local(format!("{} blocks, more than {BLOCKS}", places.len())));
        }
        match places.iter().position(wraps) {
            Some(block) => Err(local(format!("block {block} ends beyond 64 bits"))),
            None => Ok(Self { places }),
        }
    }

    /// The blocks from a destination's answer, checked by the source.
    ///
    /// `own` has the lengths of the source's blocks, in the order of its block list.
    ///
    /// # Errors
    /// - another number of blocks, or another length
    /// - addresses or offsets that do not fit 64 bits
    /// - with pin-all, a block without a key
    pub fn agreed(
        answer: &Records<'_, BlockPlace>,
        own: &[u64],
        registration: Registration,
    ) -> Result<Self, WireError> {
        let message = BlockPlace::TYPE.name();
        if answer.len() != own.len() {
            let rule = format!(
                "{} blocks, but this side has {}: start both sides with the same RAM",
                answer.len(),
                own.len()
            );
            return Err(WireError::incompatible(message, 0, BLOCKS_SPEC, rule));
        }
        let mut places = Vec::with_capacity(own.len());
        for ((at, place), own) in answer.iter().zip(own) {
            let (block, length) = (places.len(), place.length_bytes);
            if length != *own {
                let rule = format!(
                    "block {block} has {length} bytes, but {own} here: start both sides with the same \
                                    RAM"
                );
                return Err(WireError::incompatible(message, at + 16, BLOCKS_SPEC, rule));
            }
            if wraps(&place) {
                let rule = format!("block {block} of {length} bytes ends beyond 64 bits");
                return Err(WireError::misbehaved(message, at, BLOCKS_SPEC, rule));
            }
            if registration == Registration::PinAll && place.key == 0 && length > 0 {
                let rule = format!("block {block} has no key, although pin-all was agreed");
                return Err(WireError::misbehaved(message, at + 24, BLOCKS_SPEC, rule));
            }
            places.push(place);
        }
        Ok(Self { places })
    }

    /// All blocks, by index.
    pub fn blocks(&self) -> &[BlockPlace] {
        &self.places
    }

    /// Destination: the memory that a request asks for.
    ///
    /// It consists of whole chunks, except at the end of the block.
    ///
    /// # Errors
    /// An unknown block; a key outside the block.
    pub fn requested(
        &self,
        request: &RegisterRequest,
        chunk: ChunkSize,
        at: u64,
    ) -> Result<BlockRange, WireError> {
        let of = Place { message: RegisterRequest::TYPE.name(), spec: "specs/rdma.md §4.2", at };
        let (block, place) = self.block(request.block, 8, of)?;
        let offset = inside(place, request.key, 0, of)?;
        let start = offset - offset % chunk.bytes();
        let wanted = request.more_chunks.saturating_add(1).saturating_mul(chunk.bytes());
        Ok(BlockRange { block, start, length: wanted.min(place.length_bytes - start) })
    }

    /// Destination: the memory that the source wants cleared.
    ///
    /// The range may begin and end inside a page.
    ///
    /// # Errors
    /// An unknown block; a range outside the block; a value other than 0.
    pub fn cleared(&self, range: &ZeroRange, at: u64) -> Result<BlockRange, WireError> {
        let of = Place { message: ZeroRange::TYPE.name(), spec: "specs/rdma.md §4.4", at };
        if range.value != 0 {
            return Err(of.bad(0, format!("a range of value {}; only 0 is known", range.value)));
        }
        let (block, place) = self.block(range.block, 4, of)?;
        let start = inside(place, range.start, 8, of)?;
        if range.length > place.length_bytes - start {
            let (length, block_bytes) = (range.length, place.length_bytes);
            let rule = format!(
                "{length} bytes at {start:#x} are not inside block {block} of {block_bytes:#x} bytes"
            );
            return Err(of.bad(16, rule));
        }
        Ok(BlockRange { block, start, length: range.length })
    }

    /// Destination: the chunk to deregister.
    ///
    /// `is_registered` returns whether a registration begins with this range.
    ///
    /// # Errors
    /// An unknown block; a chunk that the block does not have, or that is not registered.
    pub fn given_back(
        &self,
        request: &UnregisterRequest,
        chunk: ChunkSize,
        is_registered: impl FnOnce(BlockRange) -> bool,
        at: u64,
    ) -> Result<BlockRange, WireError> {
        let of = Place { message: UnregisterRequest::TYPE.name(), spec: "specs/rdma.md §4.5", at };
        let (block, place) = self.block(request.block, 8, of)?;
        let number = request.chunk;
        let chunks = chunk.chunks_in(place.length_bytes);
        if number >= chunks {
            return Err(of.bad(0, format!("chunk {number} of block {block}, which has {chunks} of {chunk}")));
        }
        let start = number * chunk.bytes();
        let range = BlockRange { block, start, length: chunk.bytes().min(place.length_bytes - start) };
        match is_registered(range) {
            true => Ok(range),
            false => Err(of.bad(0, format!("chunk {number} of block {block} is not registered"))),
        }
    }

    /// Source: a request for the memory of `range`, counted in chunks of `unit`.
    ///
    /// Towards a QEMU, `unit` is [`ChunkSize::LEAST`], because the chunks of a QEMU are not smaller.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for an empty range, or one outside its block.
    pub fn request(&self, range: BlockRange, unit: ChunkSize) -> Result<RegisterRequest, WireError> {
        let (place, block) = self.own(range, RegisterRequest::TYPE.name(), "specs/rdma.md §4.2")?;
        if range.length == 0 {
            let rule = format!("no byte of block {block} is requested");
            return Err(WireError::local(RegisterRequest::TYPE.name(), 16, "specs/rdma.md §4.2", rule));
        }
        let first = range.start / unit.bytes();
        let last = (range.end() - 1) / unit.bytes();
        Ok(RegisterRequest { key: place.offset + range.start, block, more_chunks: last - first })
    }

    /// Source: the record of a range that contains only zeros.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for a range outside its block.
    pub fn zero_range(&self, range: BlockRange) -> Result<ZeroRange, WireError> {
        let (place, block) = self.own(range, ZeroRange::TYPE.name(), "specs/rdma.md §4.4")?;
        Ok(ZeroRange { value: 0, block, start: place.offset + range.start, length: range.length })
    }

    /// Source: the address of a range at the destination.
    ///
    /// # Errors
    /// [`Fault::Local`](crate::Fault::Local) for a range outside its block.
    pub fn address(&self, range: BlockRange) -> Result<u64, WireError> {
        let (place, _) = self.own(range, "WRITE", "specs/rdma.md §6.1")?;
        Ok(place.host_address + range.start)
    }

    /// Source: the key in the answer to a request for `block`.
    ///
    /// # Errors
    /// A key of 0; an address of the block that differs from RAM_BLOCKS_RESULT.
    pub fn key(&self, block: usize, result: &RegisterResult, at: u64) -> Result<u32, WireError> {
        let of = Place { message: RegisterResult::TYPE.name(), spec: "specs/rdma.md §4.3", at };
        if result.key == 0 {
            return Err(
                of.bad(0, format!("key 0 for block {block}, but 0 means memory without registration"))
            );
        }
        match self.places.get(block) {
            Some(place) if place.host_address == result.host_address => Ok(result.key),
            _ => {
                let rule = format!(
                    "block {block} at {:#x}, which differs from RAM_BLOCKS_RESULT",
                    result.host_address
                );
                Err(of.bad(8, rule))
            }
        }
    }

    fn block(&self, index: u32, field: u64, of: Place) -> Result<(usize, &BlockPlace), WireError> {
        let block = index as usize;
        let place = self.places.get(block);
        let count = self.places.len();
        place
            .map(|place| (block, place))
            .ok_or_else(|| of.bad(field, format!("block {index}, but there are {count}")))
    }

    /// Checks a range of this side and returns its block.
    fn own(
        &self,
        range: BlockRange,
        message: &'static str,
        spec: &'static str,
    ) -> Result<(&BlockPlace, u32), WireError> {
        let BlockRange { block, start, length } = range;
        let fits = |place: &&BlockPlace| start <= place.length_bytes && length <= place.length_bytes - start;
        match self.places.get(block).filter(fits) {
            // The index is below `BLOCKS`, so the cast is lossless.
            Some(place) => Ok((place, block as u32)),
            None => {
                let rule = format!("{length} bytes at {start:#x} are not inside block {block}");
                Err(WireError::local(message, 0, spec, rule))
            }
        }
    }
}

/// Position and message of a record, for errors.
#[derive(Clone, Copy)]
struct Place {
    message: &'static str,
    spec: &'static str,
    at: u64,
}

impl Place {
    fn bad(self, field: u64, rule: String) -> WireError {
        WireError::misbehaved(self.message, self.at + field, self.spec, rule)
    }
}

/// Whether the end of a block exceeds 64 bits, by address or offset.
fn wraps(place: &BlockPlace) -> bool {
    let length = place.length_bytes;
    place.host_address.checked_add(length).is_none() || place.offset.checked_add(length).is_none()
}

/// The offset in the block for `stated`, which includes the block's own offset.
fn inside(place: &BlockPlace, stated: u64, field: u64, of: Place) -> Result<u64, WireError> {
    let offset = stated.checked_sub(place.offset).filter(|offset| *offset < place.length_bytes);
    offset.ok_or_else(|| {
        let (from, length) = (place.offset, place.length_bytes);
        of.bad(field, format!("{stated:#x} is not in the block of {length:#x} bytes at {from:#x}"))
    })
}
