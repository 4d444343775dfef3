//! Computes the content of a statebank's blocks.
//!
//! Word `j` (64 bits, little-endian) of a block is `base + j * STEP` (mod 2^64). STEP is odd, so all words of
//! a block differ. The base is a hash of seed, block and generation, so different blocks and generations have
//! unrelated content. One addition for eight bytes is fast enough to compute content at memory speed.

/// Length of a block in bytes. The last block of a state may be shorter.
pub const BLOCK_BYTES: u64 = 64 << 10;

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The first word of a block.
pub fn base(seed: u64, block: u64, generation: u64) -> u64 {
    mix(mix(mix(seed).wrapping_add(block)).wrapping_add(generation))
}

/// Mixes the bits of a number with the finalizer of splitmix64. Each input bit affects all output bits.
pub fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(STEP);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// Fills `to` with the bytes of a block, starting at byte `offset`.
pub fn fill(base: u64, offset: usize, to: &mut [u8]) {
    let (head, rest) = to.split_at_mut(to_word(offset).min(to.len()));
    for (index, byte) in head.iter_mut().enumerate() {
        *byte = byte_at(base, offset + index);
    }
    let first = offset + head.len();
    let mut word = word_at(base, first / 8);
    let mut words = rest.chunks_exact_mut(8);
    for to in &mut words {
        to.copy_from_slice(&word.to_le_bytes());
        word = word.wrapping_add(STEP);
    }
    let tail = words.into_remainder();
    let bytes = word.to_le_bytes();
    tail.copy_from_slice(&bytes[..tail.len()]);
}

/// Index of the first byte in `bytes` that differs from the block. `bytes` starts at byte `offset` of the
/// block.
pub fn first_difference(base: u64, offset: usize, bytes: &[u8]) -> Option<usize> {
    let (head, rest) = bytes.split_at(to_word(offset).min(bytes.len()));
    let differs = |(index, byte): (usize, &u8)| (*byte != byte_at(base, offset + index)).then_some(index);
    if let Some(index) = head.iter().enumerate().find_map(differs) {
        return Some(index);
    }
    let first = offset + head.len();
    let mut word = word_at(base, first / 8);
    let mut wrong = 0;
    let mut words = rest.chunks_exact(8);
    for bytes in &mut words {
        let mut array = [0; 8];
        array.copy_from_slice(bytes);
        wrong |= u64::from_le_bytes(array) ^ word;
        word = word.wrapping_add(STEP);
    }
    let tail = words.remainder();
    if wrong == 0 && tail == &word.to_le_bytes()[..tail.len()] {
        return None;
    }
    bytes.iter().enumerate().find_map(differs)
}

/// Number of bytes from `offset` to the next word.
fn to_word(offset: usize) -> usize {
    offset.wrapping_neg() % 8
}

fn word_at(base: u64, index: usize) -> u64 {
    base.wrapping_add((index as u64).wrapping_mul(STEP))
}

fn byte_at(base: u64, offset: usize) -> u8 {
    word_at(base, offset / 8).to_le_bytes()[offset % 8]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fill_in_pieces_of_any_size_gives_the_same_bytes() {
        let mut whole = vec![0; 1000];
        fill(7, 0, &mut whole);
        for piece in [1, 3, 8, 13, 64, 999] {
            let mut pieces = vec![0; 1000];
            for (index, part) in pieces.chunks_mut(piece).enumerate() {
                fill(7, index * piece, part);
            }
            assert_eq!(pieces, whole, "pieces of {piece}");
        }
    }

    #[test]
    fn first_difference_names_the_byte_wherever_it_is() {
        for (offset, len) in [(0, 64), (3, 61), (5, 2), (8, 17), (4095, 300)] {
            let mut bytes = vec![0; len];
            fill(99, offset, &mut bytes);
            assert_eq!(first_difference(99, offset, &bytes), None);
            for at in 0..len {
                bytes[at] ^= 0x10;
                assert_eq!(first_difference(99, offset, &bytes), Some(at), "{offset} {len}");
                bytes[at] ^= 0x10;
            }
        }
    }

    #[test]
    fn base_of_neighbours_differs() {
        assert_ne!(base(1, 2, 3), base(1, 3, 2));
        assert_ne!(base(1, 2, 3), base(1, 2, 4));
        assert_ne!(base(1, 2, 3), base(2, 2, 3));
    }
}
