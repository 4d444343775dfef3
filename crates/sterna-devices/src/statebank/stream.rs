//! The stream of a saved statebank.
//!
//! Records, one after the other, each a head of 32 bytes and a body:
//!
//! | offset | what |
//! | --- | --- |
//! | 0 | u32 kind |
//! | 4 | u32 number: counts records from 0 |
//! | 8, 16, 24 | u64 each, by kind |
//!
//! | kind | first | second | third | body |
//! | --- | --- | --- | --- | --- |
//! | [`Kind::Head`], first of all | seed | bytes of the state | bytes of a block | none |
//! | [`Kind::Block`], any number, in any order | block | generation, never lower than before | bytes of the body | the block's content |
//! | [`Kind::End`], last | digest of all generations | number of blocks | bytes of the body, [`End::BYTES`] | [`End`] |
//!
//! No generation and no number of writes is above [`MOST_COUNT`].

use super::content::mix;

/// The most that a count in a stream may be: whoever goes on counting from there never gets to the end of u64.
pub const MOST_COUNT: u64 = 1 << 48;

/// Bytes in front of a body.
pub const HEAD_BYTES: usize = 32;

/// What a record is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// What the device is.
    Head = 0x4842_5453,
    /// A block.
    Block = 0x4242_5453,
    /// Nothing follows.
    End = 0x4542_5453,
}

/// A record's head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordHead {
    /// [`Kind`] as a number.
    pub kind: u32,
    /// Counts records.
    pub number: u32,
    /// By kind.
    pub fields: [u64; 3],
}

impl RecordHead {
    /// The bytes.
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..4].copy_from_slice(&self.kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.number.to_le_bytes());
        put_words(&mut bytes[8..], &self.fields);
        bytes
    }

    /// Out of its bytes.
    pub fn decode(bytes: &[u8; HEAD_BYTES]) -> Self {
        let [a, b, c, d, e, f, g, h, ..] = *bytes;
        let words = words(&bytes[8..]);
        Self {
            kind: u32::from_le_bytes([a, b, c, d]),
            number: u32::from_le_bytes([e, f, g, h]),
            fields: [words[0], words[1], words[2]],
        }
    }
}

/// What the end of a stream tells beside the digest: how the device goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct End {
    /// Bytes of state that it changes per second.
    pub dirty_rate: u64,
    /// Pages of guest RAM that it writes per second.
    pub dma_rate: u64,
    /// How many it has written.
    pub dma_writes: u64,
    /// Where, as (first, bytes) of guest-physical memory; all of it if there are no bytes.
    pub dma_window: (u64, u64),
}

impl End {
    /// Bytes of the body.
    pub const BYTES: usize = 48;

    /// The body, with a check word behind it.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let words = self.words();
        let mut bytes = [0; Self::BYTES];
        put_words(&mut bytes, &words);
        put_words(&mut bytes[40..], &[check(&words)]);
        bytes
    }

    /// Out of a body; `None` if the check word does not fit.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let words = words(bytes);
        let this = Self {
            dirty_rate: words[0],
            dma_rate: words[1],
            dma_writes: words[2],
            dma_window: (words[3], words[4]),
        };
        (check(&this.words()) == words[5]).then_some(this)
    }

    fn words(&self) -> [u64; 5] {
        [self.dirty_rate, self.dma_rate, self.dma_writes, self.dma_window.0, self.dma_window.1]
    }
}

/// The digest of the generations of all blocks.
pub fn digest(seed: u64, generations: &[u64]) -> u64 {
    let each = generations.iter().zip(0..);
    each.fold(mix(seed), |sum, (generation, block)| {
        sum.wrapping_add(super::content::base(seed ^ 0xd1_6e57, block, *generation))
    })
}

fn check(words: &[u64]) -> u64 {
    words.iter().fold(0x7e57, |sum, word| mix(sum ^ word))
}

fn put_words(to: &mut [u8], words: &[u64]) {
    for (to, word) in to.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
}

fn words(bytes: &[u8]) -> Vec<u64> {
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    bytes.chunks_exact(8).map(word).collect()
}
