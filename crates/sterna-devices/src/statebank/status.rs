//! The status of a statebank, which a client reads as a region.

use crate::vfio::MigState;

/// Index of the status region.
pub const STATUS_REGION: u32 = 0;

const MAGIC: u64 = u64::from_le_bytes(*b"STBKstat");

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u64)]
pub enum Verdict {
    /// No check was made.
    #[default]
    None = 0,
    /// The check found no error.
    Good = 1,
    /// The check found an error.
    Bad = 2,
}

/// Summary of a statebank's state, checks and counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// The device's present migration state.
    pub state: MigState,
    /// Whether the last load received exactly the source's state.
    pub loaded: Verdict,
    /// Whether guest RAM contained all DMA writes of the source's device. Checked when the loaded device
    /// began to run.
    pub ram: Verdict,
    /// Digest of the generations of all blocks. Two devices have equal digests only if their states are
    /// equal.
    pub digest: u64,
    /// Bytes of streams that were read from the device.
    pub read_bytes: u64,
    /// Bytes of streams that the device accepted.
    pub loaded_bytes: u64,
    /// Pages of guest RAM that the device has written since its first state.
    pub dma_writes: u64,
    /// Blocks of its state that the device has changed while it ran.
    pub changed_blocks: u64,
}

impl Status {
    /// Length of the region in bytes.
    pub const BYTES: usize = 72;

    /// Encodes the region's bytes, all little-endian.
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

    /// Decodes the region. `None` if it is not a statebank's.
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
