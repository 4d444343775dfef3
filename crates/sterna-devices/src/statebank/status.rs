//! What a statebank says of itself, as a region that a client reads.

use crate::vfio::MigState;

/// The region's index.
pub const STATUS_REGION: u32 = 0;

const MAGIC: u64 = u64::from_le_bytes(*b"STBKstat");

/// What became of something that is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u64)]
pub enum Verdict {
    /// It was not looked at.
    #[default]
    None = 0,
    /// All is as it must be.
    Good = 1,
    /// Something is not.
    Bad = 2,
}

/// What a statebank says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// Where it is.
    pub state: MigState,
    /// Whether the last load brought what the source had.
    pub loaded: Verdict,
    /// Whether, when it then began to run, guest RAM had all that the source's device wrote.
    pub ram: Verdict,
    /// The digest of all its blocks' generations: equal on both sides, and only for equal states.
    pub digest: u64,
    /// Bytes of streams that were read from it.
    pub read_bytes: u64,
    /// Bytes of streams that it took.
    pub loaded_bytes: u64,
    /// How many pages of guest RAM it has written since its first state.
    pub dma_writes: u64,
    /// How many blocks of its state it has changed by itself.
    pub changed_blocks: u64,
}

impl Status {
    /// Bytes of the region.
    pub const BYTES: usize = 72;

    /// The region.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let words = [
            MAGIC,
            self.state.number().into(),
            self.loaded as u64,
            self.ram as u64,
            self.digest,
            self.read_bytes,
            self.loaded_bytes,
            self.dma_writes,
            self.changed_blocks,
        ];
        let mut bytes = [0; Self::BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Out of the region; `None` if that is not a statebank's.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let word = |index: usize| {
            bytes[index * 8..index * 8 + 8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
        };
        let verdict = |word| match word {
            0 => Some(Verdict::None),
            1 => Some(Verdict::Good),
            2 => Some(Verdict::Bad),
            _ => None,
        };
        if word(0) != MAGIC {
            return None;
        }
        Some(Self {
            state: MigState::from_number(u32::try_from(word(1)).ok()?)?,
            loaded: verdict(word(2))?,
            ram: verdict(word(3))?,
            digest: word(4),
            read_bytes: word(5),
            loaded_bytes: word(6),
            dma_writes: word(7),
            changed_blocks: word(8),
        })
    }
}
