//! The bitmap of the pages that a destination has, after RECV_BITMAP (`specs/postcopy.md §5`).
//!
//! A source needs it for a recovery, to send only the missing pages.

use crate::error::WireError;
use crate::reader;

const MESSAGE: &str = "received bitmap";
const SPEC: &str = "specs/postcopy.md §5";
/// The eight bytes after the bits.
const END_MARK: u64 = 0x0123_4567_89ab_cdef;
/// Length of size and end mark, in bytes.
const FRAME_BYTES: usize = 16;

/// One bit for each page of a block, set if the destination has the page.
///
/// It follows [`ReturnMessage::ReceivedBitmap`](crate::return_path::ReturnMessage::ReceivedBitmap) and is not
/// part of that message's length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedPages {
    words: Vec<u64>,
    pages: u64,
}

impl ReceivedPages {
    /// A bitmap for a block of `pages` pages, without any received page.
    pub fn none(pages: u64) -> Self {
        Self { words: vec![0; pages.div_ceil(64) as usize], pages }
    }

    /// Length on the wire of a bitmap for `pages` pages, in bytes, with its frame.
    pub fn encoded_bytes(pages: u64) -> u64 {
        bitmap_bytes(pages) + FRAME_BYTES as u64
    }

    /// Number of pages in the block.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Marks `page` as received. Ignores a page outside the block.
    pub fn add(&mut self, page: u64) {
        if page < self.pages {
            self.words[(page / 64) as usize] |= 1 << (page % 64);
        }
    }

    /// Whether the destination has `page`.
    pub fn has(&self, page: u64) -> bool {
        page < self.pages && self.words[(page / 64) as usize] & 1 << (page % 64) != 0
    }

    /// Number of pages that the destination does not have.
    pub fn missing(&self) -> u64 {
        self.pages - self.words.iter().map(|word| u64::from(word.count_ones())).sum::<u64>()
    }

    /// The words: page `p` is bit `p % 64` of word `p / 64`. Bits after the last page are clear.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Appends size, bits and end mark.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&bitmap_bytes(self.pages).to_be_bytes());
        for word in &self.words {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&END_MARK.to_be_bytes());
    }

    /// Reads the bitmap of a block with `pages` from `buf`; `None` while bytes are missing.
    ///
    /// # Errors
    /// A size other than the block's, which is detected before the bits arrive; another end mark.
    pub fn decode(buf: &[u8], pages: u64) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, MESSAGE, |r| {
            let (size, wanted) = (r.u64()?, bitmap_bytes(pages));
            if size != wanted {
                let rule = format!("{size} bytes for a block of {pages} pages, which need {wanted}");
                return Err(r.bad(SPEC, rule));
            }
            let bits = r.take(size as usize)?;
            let mut words: Vec<u64> = bits
                .chunks_exact(8)
                .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
                .collect();
            if r.u64()? != END_MARK {
                return Err(r.bad(SPEC, format!("the end mark is not {END_MARK:016x}")));
            }
            // The content of the padding in the last byte is not specified, so it is cleared.
            if let Some(last) = words.last_mut().filter(|_| !pages.is_multiple_of(64)) {
                *last &= (1 << (pages % 64)) - 1;
            }
            Ok(Self { words, pages })
        })
    }
}

fn bitmap_bytes(pages: u64) -> u64 {
    pages.div_ceil(64) * 8
}
