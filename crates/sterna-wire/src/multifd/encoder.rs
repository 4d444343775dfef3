//! Encoder of RAM packets (`specs/stream.md §3.4`).
//!
//! It reuses its buffer, so that a lane allocates no memory per packet.

use super::layout::{FLAG_DIFFERENCES, FLAG_SYNC};
use super::layout::{MAGIC, RAM_PACKET_BYTES, VERSION};
use super::packet::Method;
use crate::error::WireError;
use crate::limits::{NAME_BYTES, PACKET_PAGES};
use std::ops::Range;

const MESSAGE: &str = "multifd RAM packet (encoder)";
const SPEC: &str = "specs/stream.md §3.4";
const NAME: Range<usize> = 64..320;
const OFFSETS: usize = 320;

/// Fills one packet after the other in the same buffer.
///
/// The order of calls is `begin`, any number of `push_normal` and `push_zero` in any order, then `finish`; or
/// only `sync`. No content of a packet remains in the next one.
#[derive(Debug, Clone)]
pub struct RamPacketEncoder {
    buffer: Box<[u8; RAM_PACKET_BYTES]>,
    method: Method,
    /// Number of bytes after [`OFFSETS`] in `buffer` that the previous packet may have set.
    written: usize,
    name_length: usize,
    normal: usize,
    zero: [u64; PACKET_PAGES],
    zeros: usize,
}

impl RamPacketEncoder {
    /// An encoder for a channel with the compression `method`.
    pub fn new(method: Method) -> Self {
        let mut buffer = Box::new([0; RAM_PACKET_BYTES]);
        buffer[0..4].copy_from_slice(&MAGIC.to_be_bytes());
        buffer[4..8].copy_from_slice(&VERSION.to_be_bytes());
        Self { buffer, method, written: 0, name_length: 0, normal: 0, zero: [0; PACKET_PAGES], zeros: 0 }
    }

    /// Starts a packet with pages of the block `name`.
    ///
    /// # Errors
    /// A name that is empty, longer than 255 bytes or contains NUL.
    pub fn begin(&mut self, name: &str) -> Result<(), WireError> {
        let bytes = name.as_bytes();
        if bytes.is_empty() || bytes.len() > NAME_BYTES || bytes.contains(&0) {
            let rule = format!("block name {name:?} is not 1 to 255 bytes without NUL");
            return Err(WireError::local(MESSAGE, 64, SPEC, rule));
        }
        if self.buffer[NAME][..self.name_length] != *bytes {
            self.buffer[NAME].fill(0);
            self.buffer[NAME][..bytes.len()].copy_from_slice(bytes);
            self.name_length = bytes.len();
        }
        self.normal = 0;
        self.zeros = 0;
        Ok(())
    }

    /// Number of pages in the packet so far, normal and zero.
    pub fn pages(&self) -> usize {
        self.normal + self.zeros
    }

    /// Number of normal pages in the packet so far.
    pub fn normal_pages(&self) -> usize {
        self.normal
    }

    /// Whether the packet has its maximum of [`PACKET_PAGES`] pages.
    pub fn is_full(&self) -> bool {
        self.pages() >= PACKET_PAGES
    }

    /// Adds a page whose content is in the payload. Returns `false` if the packet is full.
    #[must_use]
    pub fn push_normal(&mut self, offset: u64) -> bool {
        if self.is_full() {
            return false;
        }
        self.put_offset(self.normal, offset);
        self.normal += 1;
        true
    }

    /// Adds a page that contains only zeros. Returns `false` if the packet is full.
    #[must_use]
    pub fn push_zero(&mut self, offset: u64) -> bool {
        if self.is_full() {
            return false;
        }
        self.zero[self.zeros] = offset;
        self.zeros += 1;
        true
    }

    /// Ends the packet. `payload_bytes` is the length of the payload that follows.
    ///
    /// For [`Method::None`] it is the number of normal pages times the page size. Without normal pages it is 0.
    pub fn finish(&mut self, packet_number: u64, payload_bytes: u32) -> &[u8; RAM_PACKET_BYTES] {
        self.finish_with(self.method.flags(), packet_number, payload_bytes)
    }

    /// Like [`finish`](Self::finish), for a packet of [differences](super::push_difference).
    ///
    /// Such a packet has no zero pages.
    pub fn finish_differences(&mut self, packet_number: u64, payload_bytes: u32) -> &[u8; RAM_PACKET_BYTES] {
        self.finish_with(FLAG_DIFFERENCES, packet_number, payload_bytes)
    }

    fn finish_with(&mut self, flags: u32, packet_number: u64, payload_bytes: u32) -> &[u8; RAM_PACKET_BYTES] {
        for index in 0..self.zeros {
            self.put_offset(self.normal + index, self.zero[index]);
        }
        let used = 8 * self.pages();
        self.clear_offsets_from(used);
        self.put_header(flags, PACKET_PAGES as u32, payload_bytes, packet_number);
        &self.buffer
    }

    /// A SYNC packet, which has no pages and no name.
    pub fn sync(&mut self, packet_number: u64) -> &[u8; RAM_PACKET_BYTES] {
        self.buffer[NAME].fill(0);
        self.name_length = 0;
        self.normal = 0;
        self.zeros = 0;
        self.clear_offsets_from(0);
        self.put_header(FLAG_SYNC, 0, 0, packet_number);
        &self.buffer
    }

    fn put_offset(&mut self, index: usize, offset: u64) {
        let at = OFFSETS + 8 * index;
        self.buffer[at..at + 8].copy_from_slice(&offset.to_be_bytes());
        self.written = self.written.max(8 * index + 8);
    }

    /// Clears the offsets of the previous packet that this packet has not overwritten.
    fn clear_offsets_from(&mut self, used: usize) {
        if self.written > used {
            self.buffer[OFFSETS + used..OFFSETS + self.written].fill(0);
        }
        self.written = used;
    }

    fn put_header(&mut self, flags: u32, alloc: u32, payload: u32, number: u64) {
        self.buffer[8..12].copy_from_slice(&flags.to_be_bytes());
        self.buffer[12..16].copy_from_slice(&alloc.to_be_bytes());
        self.buffer[16..20].copy_from_slice(&(self.normal as u32).to_be_bytes());
        self.buffer[20..24].copy_from_slice(&payload.to_be_bytes());
        self.buffer[24..32].copy_from_slice(&number.to_be_bytes());
        self.buffer[32..36].copy_from_slice(&(self.zeros as u32).to_be_bytes());
    }
}
