//! The format of a saved statebank's stream.
//!
//! The stream is a sequence of records. Each has a head of 32 bytes and a body:
//!
//! | offset | content |
//! | --- | --- |
//! | 0 | u32 kind |
//! | 4 | u32 number: counts records from 0 |
//! | 8, 16, 24 | u64 each, by kind |
//!
//! | kind | first | second | third | body |
//! | --- | --- | --- | --- | --- |
//! | [`Kind::Head`], first of all | seed | bytes of the state | bytes of a block | none |
//! | [`Kind::Block`], any number, in any order | block | generation, never lower than before | length of the body | the block's content |
//! | [`Kind::End`], last | digest of all generations | number of blocks | length of the body, [`End::BYTES`] | [`End`] |
//!
//! Generations and numbers of writes are at most [`MOST_COUNT`].

use super::content::mix;

/// Highest value of a count in a stream. A device that continues to count from it does not overflow a u64.
pub const MOST_COUNT: u64 = 1 << 48;

/// Length of a record's head in bytes.
pub const HEAD_BYTES: usize = 32;

/// Kind of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// The device's properties, the first record.
    Head = 0x4842_5453,
    /// A block with its generation.
    Block = 0x4242_5453,
    /// The end of the stream.
    End = 0x4542_5453,
}

/// The head of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordHead {
    /// Number of the record's [`Kind`].
    pub kind: u32,
    /// Number of the record, counted from 0.
    pub number: u32,
    /// Three values whose meaning depends on the kind.
    pub fields: [u64; 3],
}

impl RecordHead {
    /// Encodes the head as 32 bytes.
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..4].copy_from_slice(&self.kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.number.to_le_bytes());
        put_words(&mut bytes[8..], &self.fields);
        bytes
    }

    /// Decodes a head of 32 bytes.
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

/// The body of the end record: the settings and counters with which the device continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct End {
    /// Bytes of state that the device changes per second.
    pub dirty_rate: u64,
    /// Pages of guest RAM that the device writes per second.
    pub dma_rate: u64,
    /// Pages of guest RAM that the device has written.
    pub dma_writes: u64,
    /// Guest-physical range (first, bytes) that the device writes. All of guest RAM if `bytes` is 0.
    pub dma_window: (u64, u64),
}

impl End {
    /// Length of the body in bytes.
    pub const BYTES: usize = 48;

    /// Encodes the body, followed by a check word.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let words = self.words();
        let mut bytes = [0; Self::BYTES];
        put_words(&mut bytes, &words);
        put_words(&mut bytes[40..], &[check(&words)]);
        bytes
    }

    /// Decodes a body. `None` if the check word is wrong.
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

/// Digest of the generations of all blocks.
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
