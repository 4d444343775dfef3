//! Decodes and checks a driver's requests to a disk.

use sterna_disk::SECTOR;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};

use super::sector::MOST_DISCARDED;
use crate::hardware::virtio::buffers::Buffers;
use crate::hardware::virtio::ring::Chain;

const HEADER_BYTES: usize = 16;
/// Size of a discard segment: first sector, number of sectors, flags.
const PIECE_BYTES: usize = 16;
/// Segment flag: the zeroes may become a hole.
const MAY_UNMAP: u32 = 1;

/// A decoded request. All checks that need no disk were made.
pub(super) struct Request<'a> {
    pub(super) head: u16,
    /// Buffer for the status byte.
    pub(super) status: Buffers<'a>,
    pub(super) what: What<'a>,
}

pub(super) enum What<'a> {
    /// Reads from this byte of the disk.
    Read(u64, Buffers<'a>),
    Write(u64, Buffers<'a>),
    Flush,
    /// The guest no longer needs the content.
    Discard(Piece),
    WriteZeroes(Piece),
    Identify(Buffers<'a>),
    /// An unknown type of request.
    Unknown,
    /// The request breaks the standard or exceeds the disk. The driver gets an error status.
    Wrong,
}

/// A range of bytes on a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) start: u64,
    pub(super) length: u64,
    pub(super) may_unmap: bool,
}

impl<'a> Request<'a> {
    /// Decodes a chain for a disk of `disk_bytes`. Fails if the chain has no buffer for the status.
    pub(super) fn of(
        chain: Chain<'a>,
        disk_bytes: u64,
        is_read_only: bool,
    ) -> Result<Self, (u16, &'static str)> {
        let Chain { head, mut readable, mut writable } = chain;
        let status = writable.split_back(1).ok_or((head, "there is no byte for the status"))?;
        let header = readable.split_front(HEADER_BYTES).ok_or((head, "the header is too short"))?;
        let mut bytes = [0; HEADER_BYTES];
        header.read(&mut bytes);
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let sector = u64::from(word(8)) | u64::from(word(12)) << 32;
        let place = |buffers: &Buffers<'_>| {
            let length = buffers.len() as u64;
            let start = sector.checked_mul(SECTOR)?;
            let fits = start.checked_add(length)? <= disk_bytes && length > 0;
            (fits && length.is_multiple_of(SECTOR)).then_some(start)
        };
        let what = match word(0) {
            VIRTIO_BLK_T_IN => place(&writable).map(|start| What::Read(start, writable)),
            VIRTIO_BLK_T_OUT if is_read_only => None,
            VIRTIO_BLK_T_OUT => place(&readable).map(|start| What::Write(start, readable)),
            VIRTIO_BLK_T_FLUSH => Some(What::Flush),
            VIRTIO_BLK_T_GET_ID if writable.len() < VIRTIO_BLK_ID_BYTES as usize => None,
            VIRTIO_BLK_T_GET_ID => Some(What::Identify(writable)),
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES if is_read_only => None,
            VIRTIO_BLK_T_DISCARD => piece(&readable, disk_bytes, 0).map(What::Discard),
            VIRTIO_BLK_T_WRITE_ZEROES => piece(&readable, disk_bytes, MAY_UNMAP).map(What::WriteZeroes),
            _ => Some(What::Unknown),
        };
        Ok(Self { head, status, what: what.unwrap_or(What::Wrong) })
    }
}

/// Decodes the only segment of a discard. The configuration space permits one.
fn piece(buffers: &Buffers<'_>, disk_bytes: u64, allowed_flags: u32) -> Option<Piece> {
    let mut bytes = [0; PIECE_BYTES];
    if buffers.len() != PIECE_BYTES || buffers.read(&mut bytes) != PIECE_BYTES {
        return None;
    }
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let sector = u64::from(word(0)) | u64::from(word(4)) << 32;
    let (count, flags) = (word(8), word(12));
    let (start, length) = (sector.checked_mul(SECTOR)?, u64::from(count) * SECTOR);
    let fits = start.checked_add(length)? <= disk_bytes;
    let is_allowed = (1..=MOST_DISCARDED).contains(&count) && flags & !allowed_flags == 0;
    (fits && is_allowed).then_some(Piece { start, length, may_unmap: flags & MAY_UNMAP != 0 })
}
