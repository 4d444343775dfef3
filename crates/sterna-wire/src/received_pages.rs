//! Which pages of a block a destination has: the bitmap behind a RECV_BITMAP answer (`specs/postcopy.md §5`).

use crate::error::WireError;
use crate::reader;

const MESSAGE: &str = "received bitmap";
const SPEC: &str = "specs/postcopy.md §5";
/// What follows the bits.
const END_MARK: u64 = 0x0123_4567_89ab_cdef;
/// Size and end mark.
const FRAME_BYTES: usize = 16;

/// One bit for each page of a block: set if the destination has the page. It follows
/// [`ReturnMessage::ReceivedBitmap`](crate::return_path::ReturnMessage::ReceivedBitmap), outside that message's length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedPages {
    words: Vec<u64>,
    pages: u64,
}

impl ReceivedPages {
    /// None of a block's `pages`.
    pub fn none(pages: u64) -> Self {
        Self { words: vec![0; pages.div_ceil(64) as usize], pages }
    }

    /// Bytes that the bitmap of a block with `pages` takes on the wire, with its frame.
    pub fn encoded_bytes(pages: u64) -> u64 {
        bitmap_bytes(pages) + FRAME_BYTES as u64
    }

    /// Pages of the block.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Marks `page` as received. A page that is not in the block is ignored.
    pub fn add(&mut self, page: u64) {
        if page < self.pages {
            self.words[(page / 64) as usize] |= 1 << (page % 64);
        }
    }

    /// Whether the destination has `page`.
    pub fn has(&self, page: u64) -> bool {
        page < self.pages && self.words[(page / 64) as usize] & 1 << (page % 64) != 0
    }

    /// Pages that it lacks.
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

    /// Reads the bitmap of a block with `pages` from the start of `buf`; `None` until all of it is there.
    ///
    /// # Errors
    /// Another size than that block's, which is noticed before the bits come; another end mark.
    pub fn decode(buf: &[u8], pages: u64) -> Result<Option<(Self, usize)>, WireError> {
        reader::decode(buf, MESSAGE, |r| {
            let (size, wanted) = (r.u64()?, bitmap_bytes(pages));
            if size != wanted {
                let rule = format!("{size} bytes for a block of {pages} pages, which take {wanted}");
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
            // The last byte is padded, and nobody says with what.
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
