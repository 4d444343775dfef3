//! A device whose every answer depends on all earlier requests. The test back end contains one, and the tests
//! compute the expected answers with another.

#![allow(dead_code, reason = "each program of tests uses a part")]

/// The device's state: requests served, and bytes that each request changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    served: u64,
    digest: u64,
    bytes: Vec<u8>,
}

const MAGIC: u64 = u64::from_le_bytes(*b"STRNVHST");
const HEAD_BYTES: usize = 32;

impl Model {
    /// A new device with `bytes` bytes of state.
    pub fn new(bytes: usize) -> Self {
        let bytes = (0..bytes as u64).map(|at| mix(at) as u8).collect();
        Self { served: 0, digest: 1, bytes }
    }

    /// Number of requests served.
    pub fn served(&self) -> u64 {
        self.served
    }

    /// Serves a request: fills `answer`, whose last word depends on all requests so far.
    pub fn serve(&mut self, request: u64, answer: &mut [u8]) {
        self.served += 1;
        let place = mix(self.served) as usize % self.bytes.len().max(1);
        if let Some(byte) = self.bytes.get_mut(place) {
            *byte ^= request as u8 | 1;
            self.digest = mix(self.digest ^ u64::from(*byte) << 32);
        }
        self.digest = mix(self.digest ^ request);
        let words = answer.len() / 8;
        for (at, word) in answer.chunks_exact_mut(8).enumerate() {
            let is_last = at + 1 == words;
            let value = if is_last { self.digest } else { mix(request ^ self.served ^ (at as u64) << 40) };
            word.copy_from_slice(&value.to_le_bytes());
        }
    }

    /// The whole state as bytes.
    pub fn save(&self) -> Vec<u8> {
        let head = [MAGIC, self.served, self.digest, self.sum()];
        let mut bytes: Vec<u8> = head.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend(&self.bytes);
        bytes
    }

    /// Decodes the bytes of [`Model::save`]. `None` if they are invalid.
    pub fn load(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
        let word = |at: usize| {
            head[8 * at..8 * at + 8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
        };
        let model = Self { served: word(1), digest: word(2), bytes: rest.to_vec() };
        (word(0) == MAGIC && word(3) == model.sum()).then_some(model)
    }

    fn sum(&self) -> u64 {
        self.bytes.iter().fold(self.bytes.len() as u64, |sum, byte| {
            (sum.rotate_left(9) ^ u64::from(*byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        })
    }
}

/// Mixes a word so that neighbouring words give unrelated results (splitmix64).
pub fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}
