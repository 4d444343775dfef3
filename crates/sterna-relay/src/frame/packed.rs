//! The payload of PACKED frames: the names of pages, and the other bytes (`specs/relay.md §10`).

use super::error::{FrameError, Rule};
use super::limits::{HEAD_BYTES, PAGE_BYTES};

const FRAME: &str = "PACKED";
const REFERENCE: u32 = 1 << 31;
/// Offset of the payload in the frame.
const PAYLOAD_AT: usize = HEAD_BYTES + PackedHead::BYTES;

/// How the bytes outside of referenced pages are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// As they are.
    Plain,
    /// As the next block of the carrier's zstd stream.
    Zstd,
}

impl Method {
    pub(super) fn from_code(code: u32) -> Option<Self> {
        [Self::Plain, Self::Zstd].into_iter().find(|method| *method as u32 == code)
    }
}

/// The place of the bytes of a PACKED frame, and how to unpack them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedHead {
    /// Offset of the first byte in the sender's direction.
    pub offset: u64,
    /// XXH3 (64 bits) of the unpacked bytes.
    pub check: u64,
    /// Number of unpacked bytes, 1 to [`DATA_BYTES`](super::DATA_BYTES).
    pub length: usize,
    /// Number of pages that the payload names, at most [`PACKED_PAGES`](super::PACKED_PAGES).
    pub pages: usize,
    /// How the other bytes are stored.
    pub method: Method,
}

impl PackedHead {
    /// Length on the wire, in bytes.
    pub const BYTES: usize = 24;
}

/// A page that a PACKED frame names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamedPage {
    /// Bytes between the page before, or the begin of the frame, and this page.
    pub gap: usize,
    /// The hash of a page that the receiver has. `None`: the bytes are there, and the receiver keeps the page.
    pub hash: Option<[u8; 32]>,
}

impl NamedPage {
    /// Appends the bytes on the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let reference = if self.hash.is_some() { REFERENCE } else { 0 };
        out.extend_from_slice(&(self.gap as u32 | reference).to_be_bytes());
        out.extend(self.hash.iter().flatten());
    }

    /// Reads the pages of a payload. Returns them, and the number of bytes that they take.
    ///
    /// # Errors
    /// The payload is too short, or a page lies outside of the unpacked bytes.
    pub fn decode_all(
        flow: u32,
        head: &PackedHead,
        payload: &[u8],
    ) -> Result<(Vec<NamedPage>, usize), FrameError> {
        let mut pages = Vec::with_capacity(head.pages);
        let (mut at, mut ends) = (0, 0);
        for _ in 0..head.pages {
            let bad = |rule| FrameError::new(FRAME, flow, PAYLOAD_AT + at, rule);
            let word = payload.get(at..).and_then(|rest| rest.first_chunk());
            let word = u32::from_be_bytes(*word.ok_or_else(|| bad(Rule::Short))?);
            let gap = (word & !REFERENCE) as usize;
            let mut used = 4;
            let mut hash = None;
            if word & REFERENCE != 0 {
                let bytes = payload.get(at + 4..).and_then(|rest| rest.first_chunk());
                hash = Some(*bytes.ok_or_else(|| bad(Rule::Short))?);
                used += 32;
            }
            ends += gap + PAGE_BYTES;
            if ends > head.length {
                return Err(bad(Rule::PageOutside { ends, length: head.length }));
            }
            pages.push(NamedPage { gap, hash });
            at += used;
        }
        Ok((pages, at))
    }
}
